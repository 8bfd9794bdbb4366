"""What people read: text, tables and panels as values, drawn as text of any width and as HTML.

Whatever is `Shown` prints itself: plain with `str`, as HTML in a notebook, in colour on a rich console. Nothing here needs rich.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Line = list[tuple[str, str]]
"""Pieces of text, each with its style; styles are words of rich, such as "bold cyan"."""
Span = str | tuple[str, str]

PLAIN_WIDTH = 110
BAR_WIDTH = 16
GAP = 2

_CSS = {
    "bold": "font-weight:650",
    "dim": "opacity:.7",
    "green": "color:#2e9e5b",
    "red": "color:#d33",
    "yellow": "color:#b7791f",
    "cyan": "color:#1591a5",
    "blue": "color:#3b82c4",
}
_CARD = (
    "font:14px/1.45 system-ui,sans-serif;border:1px solid rgba(128,128,128,.35);border-radius:10px;"
    "padding:12px 16px;max-width:56em;margin:4px 0;border-left:4px solid {colour}"
)
_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums;margin:4px 0"
_CELL = "padding:2px 14px 2px 0;text-align:{side};vertical-align:top;background:none;border:0"
_BAR = "display:inline-block;background:currentColor;border-radius:3px;height:.75em;width:{width:.1f}em"


@dataclass(frozen=True)
class Bar:
    """A part of a whole, drawn."""

    part: float
    style: str = "blue"

    @property
    def length(self) -> float:
        return min(1.0, max(0.0, self.part)) * BAR_WIDTH


Cell = Span | list[Span] | Bar


class Shown:
    """Prints itself, wherever that is. A subclass says how: `text_lines` and `html`, or `content`, which has both."""

    def content(self) -> Shown:
        raise NotImplementedError

    def text_lines(self, width: int) -> Iterator[Line]:
        """The text, no line wider than `width` if that can be."""
        return self.content().text_lines(width)

    def html(self) -> str:
        return self.content().html()

    def __str__(self) -> str:
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self.text_lines(PLAIN_WIDTH))

    def _repr_html_(self) -> str:
        return self.html()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        for line in self.text_lines(options.max_width):
            yield Text.assemble(*line)


class Text(Shown):
    """A paragraph."""

    def __init__(self, *spans: Span) -> None:
        self.spans = _line(list(spans))

    def text_lines(self, width: int) -> Iterator[Line]:
        return iter(_wrap(self.spans, width))

    def html(self) -> str:
        return f'<div style="margin:3px 0">{_inline(self.spans)}</div>'


@dataclass(frozen=True)
class Drawing(Shown):
    """Lines that are drawn for a width, once that is known."""

    draw: Callable[[int], Iterable[Line]]

    def text_lines(self, width: int) -> Iterator[Line]:
        return iter(self.draw(width))

    def html(self) -> str:
        return f"<pre>{'<br>'.join(map(_inline, self.draw(PLAIN_WIDTH)))}</pre>"


@dataclass(frozen=True)
class Table(Shown):
    """Rows of cells; None among the rows is a rule. Columns without any name have no header.

    Columns are aligned right after the first `left`, those in `wraps` left: they may wrap. Where the table is too wide, its
    columns come in several tables below each other, each with the first column. A number is never cut.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell] | None]
    left: int = 1
    wraps: Collection[int] = ()

    def _cells(self) -> list[list[Line]]:
        """The rows as lines, all of one length; [] is a rule."""
        given = [[_line(cell) for cell in row] if row is not None else [] for row in self.rows]
        return [row + [[]] * (len(self.columns) - len(row)) if row else [] for row in given]

    def text_lines(self, width: int) -> Iterator[Line]:
        rows = self._cells()
        if any(self.columns):
            rows = [[[(name, "bold")] for name in self.columns], [], *rows]
        texts = [["".join(text for text, _ in row[i]) for row in rows if row] for i in range(len(self.columns))]
        widest = [max(map(len, column), default=0) for column in texts]
        least = [
            max((len(word) for text in column for word in text.split()), default=0) if i in self.wraps else widest[i]
            for i, column in enumerate(texts)
        ]
        if self.title:
            yield [(self.title, "bold")]
        for part in _fold(least, width):
            widths = _shrink({i: widest[i] for i in part}, least, width)
            for row in rows:
                if row:
                    yield from self._draw(row, widths)
                else:
                    yield [("─" * (sum(widths.values()) + GAP * (len(widths) - 1)), "dim")]

    def _draw(self, row: list[Line], widths: dict[int, int]) -> Iterator[Line]:
        cells = {i: _wrap(row[i], width) if i in self.wraps else [row[i]] for i, width in widths.items()}
        for number in range(max(map(len, cells.values()))):
            line: Line = []
            for i, width in widths.items():
                cell = cells[i][number] if number < len(cells[i]) else []
                space = (" " * (width - _length(cell)), "")
                line += [(" " * GAP, "")] * bool(line) + ([*cell, space] if self._is_left(i) else [space, *cell])
            yield line

    def _is_left(self, column: int) -> bool:
        return column < self.left or column in self.wraps

    def html(self) -> str:
        sides = [_CELL.format(side="left" if self._is_left(i) else "right") for i in range(len(self.columns))]
        head = "".join(f'<th style="{side}">{escape(name)}</th>' for side, name in zip(sides, self.columns, strict=True))
        body = "".join(
            "<tr>" + "".join(f'<td style="{s}">{_inline(c)}</td>' for s, c in zip(sides, row, strict=False)) + "</tr>"
            for row in self.rows
            if row is not None
        )
        title = Text((self.title, "dim")).html() if self.title else ""
        return f'{title}<table style="{_TABLE}">{f"<tr>{head}</tr>" if any(self.columns) else ""}{body}</table>'


@dataclass(frozen=True)
class Panel(Shown):
    """A framed block."""

    title: str
    body: Shown
    colour: str = "cyan"

    def text_lines(self, width: int) -> Iterator[Line]:
        body = [*_wrap([(self.title, f"bold {self.colour}")], width - 4), *self.body.text_lines(width - 4)]
        inner = max(map(_length, body))
        yield [("╭" + "─" * (inner + 2) + "╮", self.colour)]
        for line in body:
            yield [("│ ", self.colour), *line, (" " * (inner - _length(line)), ""), (" │", self.colour)]
        yield [("╰" + "─" * (inner + 2) + "╯", self.colour)]

    def html(self) -> str:
        edge = _CSS[self.colour].removeprefix("color:")
        return f'<div style="{_CARD.format(colour=edge)}">{Text((self.title, "bold")).html()}{self.body.html()}</div>'


class Group(Shown):
    """Blocks one after another, with an empty line before and after tables."""

    def __init__(self, *blocks: Shown) -> None:
        self.blocks = blocks

    def text_lines(self, width: int) -> Iterator[Line]:
        before: Shown | None = None
        for block in self.blocks:
            if before is not None and not (isinstance(before, Text) and isinstance(block, Text)):
                yield []
            yield from block.text_lines(width)
            before = block

    def html(self) -> str:
        return "".join(block.html() for block in self.blocks)


def facts(rows: Iterable[tuple[str, Cell]]) -> Table:
    """Names and what is to be said of each."""
    return Table("", ("", ""), [((name, "bold"), cell) for name, cell in rows], wraps=(1,))


def bullets(title: str, sentences: Iterable[str]) -> Table:
    return Table(title, ("", ""), [((" •", "cyan"), sentence) for sentence in sentences], wraps=(1,))


def bars(title: str, columns: Sequence[str], seconds: dict[str, float], whole: float, styles: dict[str, str]) -> Table:
    """Times by name, each beside its part of a whole."""
    rows: list[Sequence[Cell]] = []
    for name, time in seconds.items():
        part = time / whole if whole else 0.0
        rows.append((name, format_seconds(time), f"{part:.0%}", Bar(part, styles.get(name, styles[""]))))
    return Table(title, (*columns, ""), rows, wraps=(3,))


def styled(style: str, *cells: str) -> list[Cell]:
    """A row in one style."""
    return [(cell, style) for cell in cells]


def _line(cell: Cell) -> Line:
    if isinstance(cell, Bar):
        return [("█" * round(cell.length), cell.style)]
    return [(span, "") if isinstance(span, str) else span for span in (cell if isinstance(cell, list) else [cell])]


def _length(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def _wrap(line: Line, width: int) -> list[Line]:
    """Lines broken at spaces, inside a word only if it is longer than a line."""
    text = "".join(part for part, _ in line)
    broken, start = [], 0
    for paragraph in text.split("\n"):
        stop = start + len(paragraph)
        while stop - start > width:
            space = text.rfind(" ", start + 1, start + width + 1)
            end = space if space > 0 else start + width
            broken.append(_cut(line, start, end))
            start = end + (space > 0)
        broken.append(_cut(line, start, stop))
        start = stop + 1
    return broken


def _cut(line: Line, start: int, stop: int) -> Line:
    """The characters from `start` to `stop`, with their styles."""
    pieces, at = [], 0
    for text, style in line:
        pieces.append((text[max(0, start - at) : max(0, stop - at)], style))
        at += len(text)
    return pieces


def _fold(least: list[int], width: int) -> Iterator[list[int]]:
    """The columns of each part of a table, the first column always among them."""
    columns = [0]
    for column in range(1, len(least)):
        needed = sum(least[i] + GAP for i in columns) + least[column]
        if len(columns) > 1 and needed > width:
            yield columns
            columns = [0]
        columns.append(column)
    yield columns


def _shrink(widths: dict[int, int], least: list[int], width: int) -> dict[int, int]:
    """The widths with the widest columns narrowed until the row fits, or no column can be narrowed."""
    excess = sum(widths.values()) + GAP * (len(widths) - 1) - width
    while excess > 0 and (loose := [i for i in widths if widths[i] > least[i]]):
        widths[max(loose, key=lambda i: widths[i])] -= 1
        excess -= 1
    return widths


def _inline(cell: Cell | Line) -> str:
    if isinstance(cell, Bar):
        return f'<span style="{_css(cell.style)};{_BAR.format(width=cell.length)}"></span>'
    line: Line = _line(cell)  # type: ignore[arg-type]  # a Line is a list of spans
    return "".join(f'<span style="{_css(s)}">{escape(text)}</span>' if s else escape(text) for text, s in line)


def _css(style: str) -> str:
    return ";".join(_CSS[word] for word in style.split() if word in _CSS)


def format_bytes(size: float | None) -> str:
    """Bytes with a binary unit, three significant digits."""
    if size is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    scale, unit = next(((s, unit) for s, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "µs"))
    value = seconds / scale
    return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {unit}"


def format_spread(low: float, high: float) -> str:
    """A range in the unit of its upper end."""
    number, unit = format_seconds(high).split()
    factor = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    return f"{low / factor:.{len(number.partition('.')[2])}f} – {number} {unit}"


def format_count(number: float, unit: str) -> str:
    """A large number with a decimal prefix, three significant digits."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
