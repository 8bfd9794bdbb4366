"""The check of the built site finds what it is for; docstrings become sections."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.site import check
from tools.site.sections import sections


def _site(folder: Path, body: str, **files: str) -> Path:
    (folder / "index.html").write_text(f"<html><body>{body}</body></html>", encoding="utf-8")
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "body",
    [
        '<script src="https://cdn.example.org/a.js"></script>',
        '<script src="//cdn.example.org/a.js"></script>',
        '<link rel="stylesheet" href="https://fonts.example.org/css">',
        '<link rel="preconnect" href="https://fonts.example.org">',
        '<img src="https://example.org/a.png">',
        '<p style="background: url(https://example.org/a.png)">',
        "<style>@import url('https://example.org/a.css')</style>",
        "<style>a { background: url(//example.org/a.png) }</style>",
    ],
)
def test_what_a_page_would_fetch_is_found(tmp_path: Path, body: str) -> None:
    assert list(check.outside_requests(_site(tmp_path, body)))


def test_what_a_reader_may_click_is_not(tmp_path: Path) -> None:
    body = '<a href="https://example.org">out</a><link rel="canonical" href="https://example.org"><img src="a.png">'
    assert not list(check.outside_requests(_site(tmp_path, body)))


def test_scripts_and_styles_are_read(tmp_path: Path) -> None:
    site = _site(tmp_path, "", a_css="@font-face { src: url('https://example.org/f.woff') }", b_js='fetch("https://example.org")')
    assert len(list(check.outside_requests(site))) == 2


def test_a_script_of_the_theme_is_trusted_only_while_no_page_wants_it(tmp_path: Path) -> None:
    script = 'load("https://unpkg.com/mermaid")'
    assert not list(check.outside_requests(_site(tmp_path, "", a_js=script)))
    assert list(check.outside_requests(_site(tmp_path, '<pre class="mermaid">', a_js=script)))


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ('<a href="other.html">', True),
        ('<a href="other.html#here">', True),
        ('<a href="#here">', True),
        ('<img src="other.png">', True),
        ('<a href="index.html">', False),
        ('<a href="#here"><p id="here">', False),
    ],
)
def test_links_that_lead_nowhere_are_found(tmp_path: Path, body: str, wrong: bool) -> None:
    assert bool(list(check.broken_links(_site(tmp_path, body)))) is wrong


def test_docstrings_become_sections() -> None:
    text = "Does it.\n\nq: queries,\n    and more.\nmask: which keys.\n\nReturns out.\n\n>>> f(q)\n>>> f(q, mask)"
    made = sections(text, {"q"})
    assert "Args:\n    q: queries,\n        and more.\n    mask: which keys.\n" in made
    assert "Examples:\n    >>> f(q)\n    >>> f(q, mask)" in made
    assert "\nReturns out.\n" in made


def test_the_fields_of_a_class_become_attributes() -> None:
    made = sections("One call.\n\nbatch: sequences.\nheads: query heads.\n\n>>> call", {"batch", "heads"}, "Attributes")
    assert "Attributes:\n    batch: sequences.\n    heads: query heads." in made and "Args:" not in made


def test_a_line_does_not_begin_with_the_stop_after_a_formula() -> None:
    hooks = pytest.importorskip("tools.site.hooks", reason="wants the docs extra")
    page = r'rows (<span class="arithmatex">\(m\)</span>), then <span class="arithmatex">\(l\)</span> too'
    made = hooks._MATH.sub(hooks._mathml, page)
    assert made.startswith('rows <span class="tw-together">(<math') and "</math>),</span> then <math" in made
