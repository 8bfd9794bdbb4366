"""`tilewise warmup`: compile the kernels that a model or a problem needs, ahead of the first call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import Json, output, progress
from tilewise.cli.options import takes_problem

if TYPE_CHECKING:
    from tilewise.problem import Problem

Model = Annotated[
    Path | None, typer.Option(help="A model's config.json, or its directory, in place of a problem; --seqlen sets the prompt.")
]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu; default: the GPU if there is one.")]
Processes = Annotated[int | None, typer.Option(min=1, help="How many compile at once.")]


@takes_problem()
def warmup_command(
    problem: Problem,
    model: Model = None,
    device: Device = None,
    backward: Annotated[bool, typer.Option(help="Also what gradients need.")] = True,
    processes: Processes = None,
    json: Json = False,
) -> None:
    """Compile the kernels that a model or a problem needs, so that no first call waits for a compiler."""
    from tilewise.api.warmup import needs_of, warm

    needs = needs_of(problem, backward) if model is None else needs_of(model, backward, problem.seqlen_q)
    with progress() as update:
        report = warm(needs, device, processes, update)
    output(report, report.to_dict(), json)
    if not report.ok:
        raise typer.Exit(1)
