"""`tilewise verify-traffic`: the IO model's bytes beside those the hardware counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import Json, console, print_json, progress

if TYPE_CHECKING:
    from tilewise.lab.report.counters import KernelTraffic


def verify_traffic_command(
    backend: Annotated[str, typer.Option(help="auto, or one by name; gradients it does not serve are another's.")] = "auto",
    ncu: Annotated[str | None, typer.Option(help="Nsight Compute's command, if it is not on the path.")] = None,
    save: Annotated[Path | None, typer.Option(help="Directory for the record.")] = None,
    json: Json = False,
) -> None:
    """Run kernels under Nsight Compute and print measured beside predicted bytes; exit status 1 if one is too far off."""
    from tilewise.lab.bench import records
    from tilewise.lab.report import verify

    path = verify.find_ncu(ncu)
    cases = tuple(replace(case, backend=backend) for case in verify.CASES)
    with progress() as update:
        update(f"{len(cases)} problems under Nsight Compute", 0.0)
        counted = verify.count(path, cases)
    kernels = [kernel for own, _ in counted for kernel in own]
    backends = [served for own, served in counted for _ in own]
    record = verify.document(kernels, backends, path)
    if json:
        print_json(record)
    else:
        show(kernels, backends)
    if save is not None:
        saved = records.save(record, save)
        if not json:
            console().print(f"[dim]record: {saved}[/]")
    raise typer.Exit(0 if kernels and record["ok"] else 1)


def show(kernels: list[KernelTraffic], backends: list[dict[str, str]]) -> None:
    from tilewise.display import Cell, Table, format_bytes, styled

    rows: list[list[Cell]] = []
    before = ""
    for kernel, chosen in zip(kernels, backends, strict=True):
        problem = kernel.case.describe()
        server = chosen["forward" if kernel.name == "forward_kernel" else "backward"]
        head: list[Cell] = [problem if problem != before else "", kernel.name, server, kernel.tile]
        before = problem
        for level in kernel.levels:
            sizes = (format_bytes(level.measured), format_bytes(level.predicted))
            off = (f"{level.off:+.1%}", "green" if level.ok else "red")
            rows.append([*head, level.level, *sizes, off, f"±{level.limit:.0%}"])
            head = [""] * len(head)
        rows.append(styled("dim", "", "", "", "", "L2 lookups", format_bytes(kernel.looked_up)))
    columns = ("problem", "kernel", "backend", "tile", "where", "measured", "predicted", "off", "limit")
    console().print(Table("Bytes counted by the hardware beside the model's", columns, rows, left=5, wraps=range(5)))
