"""`tilewise explain`: which backend and plan a problem gets, why not the others, and where its time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from tilewise.cli.console import Json, output
from tilewise.cli.options import Backend, Device, Pass, Tile, parse_tile, takes_problem

if TYPE_CHECKING:
    from tilewise.api.names import BackendName
    from tilewise.problem import Problem


@takes_problem()
def explain_command(
    problem: Problem,
    device: Device = None,
    pass_: Pass = "auto",
    tile: Tile = None,
    backend: Backend = "auto",
    measure: Annotated[bool, typer.Option("--measure", help="Run it, and name what keeps it from the roof.")] = False,
    json: Json = False,
) -> None:
    """Say which backend and plan a problem gets and why, what it moves, and what bounds it."""
    from tilewise import hardware
    from tilewise.diagnostics.explain import explain

    if device is None:  # as `plan`: the GPU if there is one
        device = "cuda" if hardware.device(None).is_gpu else "cpu"
    name = cast("BackendName", backend)
    explanation = explain(problem, device=device, backend=name, tile=parse_tile(tile), pass_=pass_, measure=measure)
    output(explanation, explanation.to_dict(), json)
