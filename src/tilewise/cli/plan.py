"""`tilewise plan`: the tile for a problem on a machine, its traffic, its predicted time, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import Json, output
from tilewise.cli.options import Backend, Device, Pass, Tile, parse_tile, takes_problem

if TYPE_CHECKING:
    from tilewise.problem import Problem


@takes_problem()
def plan_command(
    problem: Problem,
    device: Device = None,
    pass_: Pass = "auto",
    tile: Tile = None,
    backend: Backend = "auto",
    all_devices: Annotated[bool, typer.Option("--all-devices", help="Every catalogued machine side by side.")] = False,
    json: Json = False,
) -> None:
    """Choose the tile for a problem and say what it moves, how long it should take, and why."""
    from tilewise.diagnostics.plan import plan

    if all_devices:
        _compare_devices(problem, pass_, backend, json)
        return
    chosen = plan(problem, device, backend=backend, pass_=pass_, tile=parse_tile(tile))
    output(chosen, chosen.to_dict(), json)


def _compare_devices(problem: Problem, pass_: str, backend: str, json: bool) -> None:
    from tilewise.diagnostics.plan import plan
    from tilewise.display import Group, Text
    from tilewise.errors import PlanError
    from tilewise.hardware import catalogue
    from tilewise.model.show import show_comparison

    plans, impossible = [], {}
    for key, spec in catalogue().items():
        try:
            plans.append(plan(problem, spec, pass_=pass_, backend=backend))
        except PlanError as error:
            impossible[key] = str(error)
    notes = [Text((f"{key}: {why}", "dim")) for key, why in impossible.items()]
    data = {"plans": [one.to_dict() for one in plans], "impossible": impossible}
    output(Group(show_comparison(plans), *notes), data, json)
