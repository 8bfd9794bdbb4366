"""`tilewise verify-traffic`: the IO model's bytes beside those the hardware counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import Json, console, human_bytes, print_json, progress

if TYPE_CHECKING:
    from tilewise.lab.report.counters import KernelTraffic


def verify_traffic_command(
    backend: Annotated[str, typer.Option(help="auto, or one by name; gradients it does not serve are another's.")] = "auto",
    ncu: Annotated[str | None, typer.Option(help="Nsight Compute's command, if it is not on the path.")] = None,
    save: Annotated[Path | None, typer.Option(help="Directory for the record.")] = None,
    json: Json = False,
) -> None:
    """Run kernels under Nsight Compute and print measured beside predicted bytes; exit status 1 if one is too far off."""
    from tilewise.lab.report import verify

    found = verify.find_ncu(ncu)
    cases = tuple(replace(case, backend=backend) for case in verify.CASES)
    kernels, backends = [], []
    with progress() as bar:
        task = bar.add_task("", total=len(cases))
        for number, case in enumerate(cases):
            bar.update(task, description=case.words(), completed=number)
            counted, chosen, _ = verify.count(found, case)
            kernels += counted
            backends += [chosen] * len(counted)
    record = verify.document(kernels, backends, found)
    if save is not None:
        from tilewise.lab.bench.records import save as keep

        path = keep(record, save)
    if json:
        print_json(record)
    else:
        show(kernels, backends)
        if save is not None:
            console().print(f"[dim]record: {path}[/]")
    raise typer.Exit(0 if kernels and record["ok"] else 1)


def show(kernels: list[KernelTraffic], backends: list[dict[str, str]]) -> None:
    from rich.table import Table

    from tilewise.model.tables import Folded

    table = Table(title="Bytes counted by the hardware beside the model's", title_justify="left", title_style="bold")
    for name in ("problem", "kernel", "backend", "tile", "where"):
        table.add_column(name)
    for name in ("measured", "predicted", "off", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for kernel, chosen in zip(kernels, backends, strict=True):
        words = kernel.case.words()
        who = chosen["forward" if kernel.name == "forward_kernel" else "backward"]
        for number, level in enumerate(kernel.levels):
            head = (words if words != before else "", kernel.name, who, kernel.tile) if not number else ("", "", "", "")
            before = words
            colour = "green" if level.ok else "red"
            sizes = (human_bytes(level.measured), human_bytes(level.predicted))
            table.add_row(*head, level.level, *sizes, f"[{colour}]{level.off:+.1%}[/]", f"±{level.limit:.0%}")
        table.add_row("", "", "", "", "[dim]L2 lookups[/]", f"[dim]{human_bytes(kernel.looked_up)}[/]", "", "", "")
    console().print(Folded(table))
