"""Shapes of the pictures: text of SVG elements, coloured by the classes of docs/site.css, so that they follow the theme."""

from __future__ import annotations

from html import escape

ARROW = (
    '<defs><marker id="{0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse">'
    '<path d="M0 0 L8 4 L0 8 z" style="fill: var(--tw-{1})"/></marker></defs>'
)
LEGIBLE = 0.72
"""How small a picture may be shown: its letters are 12 and 14 pixels."""
MARKERS = ARROW.format("tw-arrow", "line") + ARROW.format("tw-arrow-mark", "mark")


def text(x: float, y: float, words: str, *, anchor: str = "middle", kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, *, round_: float = 4) -> str:
    at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {at} rx="{round_:g}" class="{kind}" style="stroke: var(--tw-line)"/>'


def box(x: float, y: float, width: float, height: float, kind: str, lines: tuple[str, ...]) -> str:
    """A rectangle with centred lines of text, the first of them large."""
    middle, first = x + width / 2, y + height / 2 - 9 * (len(lines) - 1) + 5
    said = [text(middle, first + 18 * i, line, kind="small" if i else "") for i, line in enumerate(lines)]
    return rect(x, y, width, height, kind) + "".join(said)


def arrow(x1: float, y1: float, x2: float, y2: float, *, both: bool = False, marked: bool = False) -> str:
    head = "tw-arrow-mark" if marked else "tw-arrow"
    start = f' marker-start="url(#{head})"' if both else ""
    kind = "mark" if marked else "line"
    at = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {at} class="{kind}" stroke-width="1.6" marker-end="url(#{head})"{start}/>'


def line(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="line"{dash}/>'


def drawing(width: float, height: float, title: str, *parts: str) -> str:
    """The whole, with a name for those who do not see it."""
    label = escape(title, quote=True)
    least = f'style="--tw-least: {LEGIBLE * width:.0f}px"'  # on a phone it scrolls sideways rather than become smaller
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {least} role="img" aria-label="{label}">'
    return head + MARKERS + "".join(parts) + "</svg>"
