"""What `make docs` adds to MkDocs: formulas as MathML, pictures drawn by code, tables of speed, the command line's own help.

Formulas become MathML while the site is built. Browsers draw it themselves, so a page needs neither a script nor a font.
"""

from __future__ import annotations

import re
import shutil
import sys
from html import unescape
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.plugins import event_priority
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

_MATH = re.compile(r'([(（“]*)<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\2>([.,;:?!)”，。；：、？！）]*)', re.DOTALL)
_PICTURE = re.compile(r"<!-- picture: ([\w-]+) -->")
_COMMANDS, _PLAYGROUND, _WALK = "<!-- commands -->", "<!-- playground -->", "<!-- walk -->"
_NO_PAGES = '<?xml version="1.0" encoding="UTF-8"?><urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9"></urlset>'
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")


def _mathml(found: re.Match[str]) -> str:
    """A formula. Within a line it stays with the brackets and stops around it: a line does not begin with a comma."""
    before, _, opened, formula, after = found.groups()
    shown = latex2mathml.converter.convert(unescape(formula), display="block" if opened == "[" else "inline")
    return f'<span class="tw-together">{before}{shown}{after}</span>' if before or after else shown


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Notes at the top of docs/ name files of the repository, which are no part of the site: their links become plain names."""
    from tools.site import speed
    from tools.site.commands import commands

    source = page.file.src_uri
    markdown = speed.fill(markdown, "zh" if source.endswith(".zh.md") else "en")
    if "/" not in source:
        markdown = _OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].removeprefix('../')}`)", markdown)
        markdown = re.sub(r"\[(中文|English)\]\(primer(\.zh)?\.md\)[.。] ?", "", markdown)
    return markdown.replace(_COMMANDS, commands()) if _COMMANDS in markdown else markdown


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Formulas, pictures and the playground, in the page's language."""
    from tools.site import pictures, playground, walk

    language = "zh" if page.file.src_uri.endswith(".zh.md") else "en"
    if _PLAYGROUND in html:
        html = html.replace(_PLAYGROUND, playground.form(language, get_relative_url("playground", page.url)))
    if _WALK in html:
        html = html.replace(_WALK, walk.frame(language, get_relative_url(".", page.url)))
    html = _PICTURE.sub(lambda found: pictures.figure(found[1], language), html)
    return _MATH.sub(_mathml, html)


def _report() -> Path:
    """The report that `make docs` made; one is made where there is none."""
    from tools.site import walk

    return walk.MADE if walk.MADE.exists() else walk.make(walk.MADE)


@event_priority(-200)
def on_post_build(*, config: Any, **_: Any) -> None:
    """The report beside the pages, and an empty map of the site in each folder.

    The theme looks for the map beside the page of each language, and complains in the console if there is none.
    A site without an address has nothing to put into it.
    """
    shutil.copyfile(_report(), Path(config["site_dir"]) / "report.html")
    for folder in {page.parent for page in Path(config["site_dir"]).rglob("*.html")}:
        (folder / "sitemap.xml").write_text(_NO_PAGES, encoding="utf-8")
