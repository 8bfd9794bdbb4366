"""What the commands share: the console, JSON output, progress, and numbers as people read them."""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from tilewise.errors import TilewiseError

P = ParamSpec("P")
R = TypeVar("R")

USAGE_ERROR = 2
SILENCE = 10.0
"""Seconds after which a word is due where there is no bar."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def console() -> Console:
    return Console(highlight=False)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def spoken(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose TilewiseErrors become one line on stderr and exit status 2 instead of a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except TilewiseError as error:
            Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_escaped(str(error))}")
            raise typer.Exit(USAGE_ERROR) from None

    return run


class _Progress(Progress):
    """A bar; where none can be drawn, a line now and then says what is being waited for."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        super().__init__(*columns, **options)
        self.spoke = time.monotonic()

    def update(self, task_id: TaskID, **fields: Any) -> None:
        super().update(task_id, **fields)
        if self.disable and fields.get("description") and time.monotonic() - self.spoke > SILENCE:
            self.spoke = time.monotonic()
            self.console.print(fields["description"], markup=False, highlight=False)


def progress() -> Progress:
    """A bar on stderr, so that what is piped stays clean; it leaves nothing behind."""
    err = Console(stderr=True)
    return _Progress(
        SpinnerColumn(),
        TextColumn("[progress.description]{task.description}"),
        BarColumn(bar_width=32),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


def human_bytes(count: float | None) -> str:
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor or unit == "µs":
            value = seconds / factor
            return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {unit}"
    raise AssertionError


def human_spread(low: float, high: float) -> str:
    """A range in the unit of its upper end."""
    top = human_seconds(high)
    factor = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[top.split()[1]]
    decimals = len(top.split()[0].partition(".")[2])
    return f"{low / factor:.{decimals}f} – {top}"


def human_error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
