"""What the commands share: the console, JSON output, progress, and errors as one line."""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tilewise.errors import TilewiseError

P = ParamSpec("P")
R = TypeVar("R")

USAGE_ERROR = 2
INTERRUPTED = 130
SILENCE = 10.0
"""Seconds after which a line of progress is due where there is no bar."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def console() -> Console:
    return Console(highlight=False)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def output(shown: Any, data: Any, json: bool) -> None:
    """Print what a command has to say: `data` with --json, else what is shown."""
    if json:
        print_json(data)
    else:
        console().print(shown)


def with_error_line(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose TilewiseErrors become one line on stderr and exit status 2 instead of a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except TilewiseError as error:
            Console(stderr=True, highlight=False).print(Text.assemble(("error:", "bold red"), f" {error}"))
            raise typer.Exit(USAGE_ERROR) from None

    return run


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A function that takes what is being done and the part that is done, from 0 to 1, and draws it.

    The bar is on stderr, so that what is piped stays clean, and leaves nothing behind. Where none can be drawn, a line now and
    then says what is being waited for.
    """
    err = Console(stderr=True, highlight=False)
    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(bar_width=32), TimeElapsedColumn())
    last = time.monotonic()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def update(what: str, done: float) -> None:
            nonlocal last
            bar.update(task, description=what, completed=done)
            if bar.disable and time.monotonic() - last > SILENCE:
                last = time.monotonic()
                err.print(what, markup=False)

        yield update


class Interruption:
    """Whether measuring was interrupted, and so why something was left out."""

    came = False

    def __str__(self) -> str:
        return "after the interruption" if self.came else "for time"


@contextmanager
def keeping(found: list[Any]) -> Iterator[Interruption]:
    """Ctrl-C, or SIGTERM as `timeout` sends it, ends what is measured here; what has been `found` by then is kept."""
    interruption = Interruption()
    here = threading.current_thread() is threading.main_thread()  # only there are signals handled
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if here else None
    try:
        yield interruption
    except KeyboardInterrupt:
        if not found:
            raise
        interruption.came = True
        Console(stderr=True, highlight=False).print("[yellow]interrupted[/]: what was measured until now")
    finally:
        if here:
            signal.signal(signal.SIGTERM, before)
