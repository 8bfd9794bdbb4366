"""`tilewise report`: one self-contained HTML page about attention on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.console import Json, console, print_json, progress

RECORDS = Path("benchmarks")

Records = Annotated[
    list[Path] | None,
    typer.Option(metavar="<path>", help="Directories with records of `tilewise bench --save`; may be repeated."),
]


def report_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write it.")] = Path("tilewise-report.html"),
    records: Records = None,
    language: Annotated[str, typer.Option(help="en or zh; the page can switch.")] = "en",
    json: Json = False,
) -> None:
    """Write one HTML page that shows what attention costs here: roofline, traffic, tiles, precision, a certified run."""
    for directory in records or ():
        check_records(directory)
    path = write_report(output, records, language)
    if json:
        print_json({"path": str(path), "bytes": path.stat().st_size})
        return
    from tilewise.display import format_bytes

    note = f"{format_bytes(path.stat().st_size)}, opens in any browser, offline"
    console().print(f"[bold]Report[/]  {path}  [dim]{note}[/]", soft_wrap=True)


def check_records(directory: Path) -> None:
    """Raise on a directory, asked for, that has nothing to show."""
    from tilewise.errors import ArgumentError
    from tilewise.lab.report import machine

    if not directory.is_dir():
        raise ArgumentError(f"records: there is no directory {directory}; need one with records of `tilewise bench --save`")
    if not any(machine.records([directory]).values()):
        raise ArgumentError(f"records: {directory} holds no record; `tilewise bench --save {directory}` makes one")


def write_report(output: Path, records: list[Path] | None = None, language: str = "en") -> Path:
    """Gather and write the page, with a progress bar."""
    from tilewise.lab.report.page import write

    with progress() as update:
        return write(output, records or [RECORDS], language, update)
