"""The report, made while the site is built, and its walk over the tiles as a frame of a page.

`python -m tools.site.walk build/report.html` writes the report. Asked for as `report.html?embed=walk` it shows its walk alone,
in the language and the colours of the page around it: what does that is added here, and the report itself knows nothing of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "build" / "report.html"
PARTS = Path(__file__).parent / "frame"
DATA = '<script type="application/json" id="tables">'
"""What follows plotly in a report, and stands before its own scripts."""
_TEXTS = {
    "en": ("The walk over the tiles", "The whole report"),
    "zh": ("逐块走一遍", "完整的报告"),
}


def make(path: Path) -> Path:
    """Write the report, with this project's records, fit to be shown in a frame."""
    from tilewise.lab.report import page

    page.write(path, [ROOT / "benchmarks"])
    path.write_text(framed(path.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def framed(html: str) -> str:
    """A report that can show its walk alone."""
    style, before, between, after = (
        (PARTS / name).read_text(encoding="utf-8") for name in ("frame.css", "before.js", "between.js", "after.js")
    )
    for place, added in (
        ("</head>", f"<style>{style}</style><script>{before}</script>"),
        (DATA, f"<script>{between}</script>"),
        ("</body>", f"<script>{after}</script>"),
    ):
        head, found, rest = html.rpartition(place) if place == "</body>" else html.partition(place)
        if not found:
            raise ValueError(f"the report has no {place}")
        html = head + added + place + rest
    return html


def frame(language: str, base: str) -> str:
    """The walk as a part of a page; `base` leads from the page to the top of the site."""
    title, whole = _TEXTS[language]
    source = f"{base}/report.html?language={language}"
    return (
        f'<iframe class="tw-walk" title="{title}" src="{source}&amp;embed=walk" loading="lazy"></iframe>'
        f'<p><a href="{source}">{whole}</a></p><script src="{base}/tutorials/walk.js"></script>'
    )


if __name__ == "__main__":
    print(make(Path(sys.argv[1]) if sys.argv[1:] else MADE))
