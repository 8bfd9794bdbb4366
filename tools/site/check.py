"""The built site holds together: every link and picture leads to a file of the site, and nothing is asked of other hosts.

`python -m tools.site.check build/site` prints what is wrong and exits with 1.

Links that a reader clicks may lead outside. What a browser fetches by itself may not: scripts, styles, images, frames, fonts,
`@import` and `url(…)`. The theme's own script names hosts that it asks only for features which the pages do not use (diagrams
by mermaid, the badge of a repository); the pages are checked to use none of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
FETCHING_RELS = {"stylesheet", "preload", "prefetch", "preconnect", "dns-prefetch", "icon", "manifest", "modulepreload"}
_CSS = re.compile(r"@import\s+[\"']?(?:url\()?[\"']?(?:https?:)?//|url\(\s*[\"']?(?:https?:)?//", re.IGNORECASE)
_HOSTS = re.compile(r"[\"'`](https?://[\w.-]+)")
THEME_NAMES = {
    "https://unpkg.com": 'class="mermaid"',
    "https://api.github.com": 'data-md-component="source"',
    "https://gitlab.com": 'data-md-component="source"',
    "http://www.w3.org": "",
}
"""Hosts named in the theme's scripts, and what a page would hold if the script were to ask them; "" for the name of a format."""


class Page(HTMLParser):
    """Links, anchors and what a browser fetches, of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.fetched += [values[name] for name in FETCHED.get(tag, ()) if values.get(name)]
        if tag == "link" and set(values.get("rel", "").split()) & FETCHING_RELS:
            self.fetched.append(values.get("href", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if "style" in values and _CSS.search(values["style"]):
            self.fetched.append(values["style"])


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _is_outside(address: str) -> bool:
    return bool(re.match(r"(?:[a-z]+:)?//", address.strip(), re.IGNORECASE))


def broken_links(site: Path) -> Iterator[str]:
    """Links within the site that lead nowhere."""
    pages = {path: read(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in [*page.links, *page.fetched]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{path.relative_to(site)}: {link} leads nowhere"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)}: {link} has no such anchor"


def outside_requests(site: Path) -> Iterator[str]:
    """What a browser would ask of another host."""
    texts = []
    for path in site.rglob("*.html"):
        texts.append(path.read_text(encoding="utf-8"))
        for address in read(path).fetched:
            if _is_outside(address) or _CSS.search(address):
                yield f"{path.relative_to(site)} fetches {address}"
        for style in re.findall(r"<style[^>]*>(.*?)</style>", texts[-1], re.DOTALL):
            if _CSS.search(style):
                yield f"{path.relative_to(site)} has a style that fetches from another host"
    for path in site.rglob("*.css"):
        if _CSS.search(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)} fetches from another host"
    everything = "\n".join(texts)
    for path in site.rglob("*.js"):
        for host in sorted(set(_HOSTS.findall(path.read_text(encoding="utf-8", errors="replace")))):
            if host not in THEME_NAMES:
                yield f"{path.relative_to(site)} names {host}"
            elif THEME_NAMES[host] and THEME_NAMES[host] in everything:
                yield f"{path.relative_to(site)} would ask {host}: a page holds {THEME_NAMES[host]}"


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    pages = list(site.rglob("*.html"))
    wrong = [*broken_links(site), *outside_requests(site)]
    print("\n".join(wrong) or f"{len(pages)} pages: every link leads somewhere, and nothing is asked of other hosts")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
