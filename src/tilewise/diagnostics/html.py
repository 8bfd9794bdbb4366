"""The little HTML that notebooks show: tables and bars that read well on light and dark pages, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_CARD = (
    "font:14px/1.45 system-ui,sans-serif;border:1px solid rgba(128,128,128,.35);border-radius:10px;"
    "padding:12px 16px;max-width:56em;margin:4px 0"
)
_CELL = "padding:2px 14px 2px 0;text-align:{side};vertical-align:top;background:none;border:0"


def card(title: str, parts: Iterable[str], mark: str = "") -> str:
    """A framed block; `mark` is a colour for its left edge."""
    edge = f";border-left:4px solid {mark}" if mark else ""
    head = f'<div style="font-weight:650;margin-bottom:6px">{escape(title)}</div>'
    return f'<div style="{_CARD}{edge}">{head}{"".join(parts)}</div>'


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = (), numbers: int = 1) -> str:
    """Cells are text; columns from `numbers` on are set right."""

    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(
            f'<{tag} style="{_CELL.format(side="left" if i < numbers else "right")}">{escape(str(cell))}</{tag}>'
            for i, cell in enumerate(row)
        )

    top = f"<tr>{cells(head, 'th')}</tr>" if head else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<table style="border-collapse:collapse;font-variant-numeric:tabular-nums;margin:4px 0">{top}{body}</table>'


def text(words: str, *, dim: bool = False) -> str:
    return f'<div style="margin:3px 0{";opacity:.7" if dim else ""}">{escape(words)}</div>'


def bars(shares: Iterable[tuple[str, float, str]]) -> str:
    """Name, share of the longest bar, and what to write behind it."""
    lines = "".join(
        f'<tr><td style="{_CELL.format(side="left")}">{escape(name)}</td>'
        f'<td style="{_CELL.format(side="left")};width:14em"><div style="background:#3b82c4;border-radius:3px;height:.75em;'
        f'margin-top:.35em;width:{max(0.0, min(1.0, share)) * 100:.1f}%"></div></td>'
        f'<td style="{_CELL.format(side="right")}">{escape(behind)}</td></tr>'
        for name, share, behind in shares
    )
    return f'<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">{lines}</table>'
