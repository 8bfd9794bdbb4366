"""Spelling of the English: every word of the pages, the README and the notes is in a dictionary or in this project's list.

`python -m tools.site.spelling` prints what is not known, with its place, and exits with 1. Code, formulas, links, Chinese and
names written as code are left out. Terms of the field and of this package are in words.txt beside this file: a word that is
right but unknown goes there, in lower case and in order.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORDS = Path(__file__).with_name("words.txt")
_LEFT_OUT = re.compile(
    r"\A---\n.*?^---$"  # settings of a page
    r"|^(?P<fence> *```+).*?^ *```+ *$"  # blocks
    r"|<!-- speed: .*?<!-- /speed -->"  # tables drawn from records, with the names of their rows
    r"|<!--.*?-->|<[^>\n]+>"  # comments and tags
    r"|\$\$.*?\$\$|\$[^$\n]+\$"  # formulas
    r"|``.+?``|`[^`\n]+`"  # names
    r"|\]\([^)\n]*\)|\{[#.:][^}\n]*\}"  # targets of links, anchors
    r"|https?://\S+|\S+\.(?:md|py|json|html|svg|toml|txt|yml|css|js|ir)\b|\S*[_/\\=@]\S*",  # addresses, files, identifiers
    re.MULTILINE | re.DOTALL,
)
_WORD = re.compile(r"(?<![\w\u4e00-\u9fff'’-])[A-Za-z][a-z]+(?:['’][a-z]+)?(?![\w\u4e00-\u9fff])")


def documents() -> list[Path]:
    """Everything in English that a reader sees."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if not path.name.endswith(".zh.md")]
    return sorted([*pages, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))])


def read(path: Path) -> str:
    """A document. The tables of docs/models.md are written by a program, with the names and the messages of transformers."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^\|.*$", "", text, flags=re.MULTILINE) if path.name == "models.md" else text


def words(text: str) -> Iterator[tuple[int, str]]:
    """The words of a page with their lines, counted from 1. What is left out keeps its line breaks."""
    prose = _LEFT_OUT.sub(lambda found: "\n" * found[0].count("\n") + " ", text)
    for number, line in enumerate(prose.splitlines(), 1):
        for found in _WORD.finditer(line.replace("-", " ")):
            word = found[0].replace("’", "'").lower().removesuffix("'s")
            if len(word) > 2:
                yield number, word


@cache
def known() -> frozenset[str]:
    return frozenset(line for line in WORDS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))


def unknown(text: str) -> list[tuple[int, str]]:
    """Words of a page that neither the dictionary nor the project's list has."""
    found = [(number, word) for number, word in words(text) if word not in known()]
    strange = _dictionary().unknown({word for _, word in found})
    return [(number, word) for number, word in found if word in strange]


@cache
def _dictionary() -> Any:
    from spellchecker import SpellChecker

    return SpellChecker(language="en", distance=1)


def main() -> int:
    bad = 0
    for path in documents():
        for number, word in unknown(read(path)):
            print(f"{path.relative_to(ROOT)}:{number}: {word}")
            bad += 1
    print(f"{bad} words are in no dictionary" if bad else f"{len(documents())} documents: every word is known")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
