"""The site: every block runs and prints what its page says, both languages say the same, and every name is where it is said
to be. What needs the built site is checked by `make docs`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from tools.site import pages, pictures

from tests.interpreter import needs_interpreter

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = pages.pages()
NAMES = [str(path.relative_to(DOCS)) for path in PAGES]
ENGLISH = [path for path in PAGES if not path.name.endswith(".zh.md")]
WITH_CODE = [path for path in PAGES if pages.fences(path.read_text(encoding="utf-8"))]
PAIRS = [path for path in ENGLISH if path.parent.name != "reference"]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class _Loader(yaml.SafeLoader):
    """mkdocs.yml names a function of Python, which is nothing to us."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)


def _chinese(path: Path) -> Path:
    return path.with_name(path.stem + ".zh.md")


@pytest.mark.parametrize("path", [p for p in WITH_CODE if not pages.needs_own_process(p)], ids=lambda p: str(p.relative_to(DOCS)))
def test_every_block_prints_what_the_page_says(path: Path) -> None:
    assert pages.faults(path) == ""


@needs_interpreter
@pytest.mark.parametrize("path", [p for p in WITH_CODE if pages.needs_own_process(p)], ids=lambda p: str(p.relative_to(DOCS)))
def test_pages_that_want_their_own_process(path: Path) -> None:
    assert pages.faults(path) == ""


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_blocks_are_of_known_languages_and_say_why_they_do_not_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert {fence.language for fence in pages.fences(text)} <= pages.LANGUAGES
    assert len(re.findall(r"^ *```python", text, re.M)) == sum(f.language == "python" for f in pages.fences(text))
    marks = re.findall(r"<!-- (?!picture: |own process|commands|semantics|playground|walk).*? -->", text)
    assert len(marks) == sum(bool(fence.mark) for fence in pages.fences(text)), "a mark without a reason, or before no block"


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_lead_to_pages(path: Path) -> None:
    for link in _LINK.findall(path.read_text(encoding="utf-8")):
        if "://" not in link and not link.startswith("#"):
            assert (path.parent / link.split("#")[0]).exists(), link


@pytest.mark.parametrize("path", PAIRS, ids=lambda p: str(p.relative_to(DOCS)))
def test_both_languages_say_the_same(path: Path) -> None:
    """The same code, outputs, pictures, links and headings, and the same figures in the text."""
    english, chinese = (one.read_text(encoding="utf-8") for one in (path, _chinese(path)))
    assert re.search(r"[\u4e00-\u9fff]{4}", chinese)

    def code(text: str) -> list[str]:
        fences = pages.fences(text)
        return [ast.dump(ast.parse(f.code)) if f.language == "python" else f.code.split("#")[0] for f in fences]

    def prose(text: str) -> str:
        return re.sub(r"```.*?```|\$[^$]*\$|\]\([^)]*\)|`[^`]*`|<!--.*?-->", " ", text, flags=re.S)

    def figures(text: str) -> list[str]:
        return sorted(re.findall(r"\d[\d.,]*\d|\d", prose(text)))

    assert code(english) == code(chinese)
    for pattern in (r"<!-- picture: [\w-]+ -->", r"^#+ ", r"\$\$", _LINK.pattern):
        assert re.findall(pattern, english, re.M) == re.findall(pattern, chinese, re.M), pattern
    assert figures(english) == figures(chinese)


def _nav(entries: object) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in values for page in _nav(entry)]  # type: ignore[union-attr]


def test_every_page_is_in_the_navigation_and_every_heading_is_translated() -> None:
    assert set(_nav(CONFIG["nav"])) >= {str(path.relative_to(DOCS)) for path in ENGLISH}
    chinese = next(p["i18n"] for p in CONFIG["plugins"] if isinstance(p, dict) and "i18n" in p)["languages"][1]
    assert {key for entry in CONFIG["nav"] for key in entry} <= set(chinese["nav_translations"])


def test_every_public_name_is_in_the_reference() -> None:
    import tilewise

    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    shown = re.findall(r"^::: tilewise\.(\w+)$", text, re.M)
    assert sorted(shown) == sorted({*tilewise.__all__, "nn"} - {"__version__"})


def test_every_environment_variable_is_in_the_reference() -> None:
    text = (DOCS / "reference/environment.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"\bTILEWISE_\w+", text)) == set(re.findall(r"\bTILEWISE_[A-Z_]+", source))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_picture_is_drawn_and_used(language: str) -> None:
    used = {name for path in PAGES for name in re.findall(r"<!-- picture: ([\w-]+) -->", path.read_text(encoding="utf-8"))}
    assert used == {*pictures.PICTURES, *(f"mask-{name}" for name in pictures.MASKS)}
    for name in used:
        assert pictures.figure(name, language).startswith('<figure class="tw-picture"><svg')
    assert pictures.figure("memory", "zh") != pictures.figure("memory", "en")


def test_a_wrong_output_is_found(tmp_path: Path) -> None:
    text = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    (fence, shown), = pages.outputs(text)
    printed = pages.run_python(fence.code, "page", fence.first, {})
    assert shown is not None and pages.Printed(fence, shown, printed).wrong
    assert not pages.Printed(fence, shown, "3 \n").wrong
