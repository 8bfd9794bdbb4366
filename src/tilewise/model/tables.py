"""Tables and drawings that fit the width there is: a number is never cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table


class Folded:
    """A table; where it is too wide, its columns come in several tables below each other, each with the first column.

    Columns of numbers are given as `no_wrap`; those of words may wrap before the table is folded.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, columns in enumerate(self._parts(console, options)):
            part = _some(self.table, columns)
            if number:
                part.title = None
            yield part

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.table)

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[list[int]]:
        """The columns of each table, the first one always among them."""
        columns = [0]
        for column in range(1, len(self.table.columns)):
            if len(columns) > 1 and _width(console, options, _some(self.table, [*columns, column])) > options.max_width:
                yield columns
                columns = [0]
            columns.append(column)
        yield columns


class Fitted:
    """What is drawn for a width, once that is known."""

    def __init__(self, draw: Callable[[int], RenderableType]) -> None:
        self.draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(options.max_width)


def _some(table: Table, columns: list[int]) -> Table:
    part = copy(table)
    part.columns = [replace(table.columns[column], _index=index) for index, column in enumerate(columns)]
    return part


def _width(console: Console, options: ConsoleOptions, table: Table) -> int:
    """How wide a table is if nothing is cut, and only what may wrap is wrapped."""
    wide = options.update(max_width=10_000)
    bare = copy(table)
    bare.title = None
    width = Measurement.get(console, wide, bare).maximum
    for column in table.columns:
        if not column.no_wrap:
            cells = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
            width -= max(cell.maximum for cell in cells) - max(cell.minimum for cell in cells)
    return width
