"""Both READMEs show the same commands and examples; only the prose differs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")}
ENGLISH, CHINESE = TEXTS.values()


def page(name: str) -> tuple[str, str]:
    """A page of the site, which was part of the README, in both languages."""
    english, chinese = ((ROOT / "docs" / f"{name}{end}").read_text(encoding="utf-8") for end in (".md", ".zh.md"))
    return english, chinese


def examples(text: str) -> list[str]:
    """Python blocks without their comments."""
    return [ast.dump(ast.parse(block)) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


def commands(text: str) -> dict[str, list[str]]:
    """Commands of the table with the options shown for each."""
    rows = re.findall(r"^\| `tilewise ([\w-]+)` \|(.*)\|$", text, re.MULTILINE)
    return {name: re.findall(r"`(--[^`]+)`", text) for name, text in rows}


def codes(text: str) -> list[str]:
    """What is set as code in the left column of the tables of meaning."""
    return re.findall(r"^\| [^|`]*`([^`]+)`[^|]*\|", text, re.MULTILINE)


def test_the_same_examples() -> None:
    assert examples(ENGLISH) and examples(ENGLISH) == examples(CHINESE)


def test_the_same_commands_with_the_same_options() -> None:
    english, chinese = page("how-to/commands")
    assert commands(english) and commands(english) == commands(chinese)
    lines = [re.findall(r"^(?:Commands|命令).* · .*", text, re.MULTILINE) for text in TEXTS.values()]
    named = [re.findall(r"`([a-z-]+)`", line) for (line,) in lines]
    assert named[0] and named[0] == named[1]


def test_the_same_make_targets() -> None:
    targets = [re.findall(r"^make ([a-z-]+)", text, re.MULTILINE) for text in TEXTS.values()]
    assert targets[0] and targets[0] == targets[1]


def test_the_same_install_commands() -> None:
    lines = [re.findall(r"^pip install \S+", text, re.MULTILINE) for text in TEXTS.values()]
    assert lines[0] and lines[0] == lines[1]


def test_the_same_meanings_are_told() -> None:
    english, chinese = page("reference/semantics")
    assert codes(english) and codes(english) == codes(chinese)
    assert english.count("\n| ") == chinese.count("\n| ")


def test_each_leads_to_the_other() -> None:
    assert "(README.zh-CN.md)" in ENGLISH and "(README.md)" in CHINESE
    for link in re.findall(r"\]\(([^)#]+)\)", CHINESE):
        assert (ROOT / link).exists(), link
