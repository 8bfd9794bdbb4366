"""Every section of the five tutorials has its page, and every figure of theirs is printed by code on a page of ours.

That the blocks print what their pages show is `test_pages`; here the output that a page shows is searched.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.site import pages

from tests.docs.tutorial_figures import FIGURES, SECTIONS, Figure

DOCS = Path(__file__).resolve().parents[2] / "docs"
LISTS = [DOCS / "background/tutorials.md", DOCS / "background/tutorials.zh.md"]


def _outputs(page: Path) -> str:
    """What the blocks of a page print, as far as it is compared with what they do print."""
    found = pages.outputs(page.read_text(encoding="utf-8"))
    return "\n\n".join(shown.code for fence, shown in found if shown is not None and not fence.mark)


@pytest.mark.parametrize("suffix", [".md", ".zh.md"])
@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.what)
def test_the_figure_is_printed_on_its_page(figure: Figure, suffix: str) -> None:
    page = DOCS / "tutorials" / (figure.page + suffix)
    assert figure.printed in _outputs(page)


def test_pages_name_the_tutorials_whose_figures_they_use() -> None:
    for page, tutorial in sorted({(figure.page, figure.tutorial) for figure in FIGURES}):
        for suffix in (".md", ".zh.md"):
            text = (DOCS / "tutorials" / (page + suffix)).read_text(encoding="utf-8")
            assert f"《{tutorial}》" in text, f"{page}{suffix} uses figures of {tutorial}"


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
@pytest.mark.parametrize("tutorial", SECTIONS)
def test_every_section_has_a_row_with_a_page(path: Path, tutorial: str) -> None:
    text = path.read_text(encoding="utf-8")
    table = text[text.index(f"\n## {tutorial}\n") :].split("\n## ")[1]
    rows = [row.strip("|").split("|") for row in table.splitlines() if row.startswith("| ")][1:]
    assert all(re.search(r"\]\([\w./#-]+\.md", row[-1]) for row in rows)
    cells = [row[0].strip() for row in rows]
    parts = [part for cell in cells for at in (r"（|）|[：、](?=\d)", r"（|）|、") for part in re.split(at, cell)]
    named = {re.sub(r"^[\d.]+ ", "", part) for part in parts}
    assert [section for section in SECTIONS[tutorial] if section not in named] == []


def test_each_erratum_names_its_tutorial_and_the_page_that_corrects_it() -> None:
    for path, heading in zip(LISTS, ("## Errata", "## 勘误"), strict=True):
        text = path.read_text(encoding="utf-8")
        rows = [row.strip("|").split("|") for row in text[text.index(heading) :].splitlines() if row.startswith("| ")][1:]
        assert len(rows) >= 17
        for tutorial, _, page in rows:
            assert tutorial.strip() in SECTIONS
            assert re.search(r"\.\./tutorials/[\w-]+\.md", page)
