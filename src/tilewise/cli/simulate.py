"""`tilewise simulate`: run a schedule literally on a small problem and count every byte."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import Json, output
from tilewise.cli.options import parse_tile, takes_problem

if TYPE_CHECKING:
    from tilewise.model import TilePlan
    from tilewise.problem import Problem

MOST_SCORES = 2**22
DECODE_SPLITS = 4
TIMELINE_DEVICE = "a100"


@takes_problem(without="batch", seqlen=256, heads=1, head_dim=64, dtype="fp16")
def simulate_command(
    problem: Problem,
    schedule: Annotated[
        str,
        typer.Option(
            help="standard, standard3, v1, v2, decode, backward or backward_fused; several with commas; "
            "v1:normalised and v2:normalised take the other form of the softmax."
        ),
    ] = "v2",
    tile: Annotated[str, typer.Option(help="Query rows and keys of a tile.")] = "64x32",
    stages: Annotated[int, typer.Option(help="K/V tiles in flight.")] = 2,
    sram: Annotated[int | None, typer.Option(help="On-chip bytes; too few are an error.")] = None,
    precision: Annotated[bool, typer.Option("--precision", help="The precision experiment instead.")] = False,
    json: Json = False,
) -> None:
    """Run attention schedules literally on a small problem: bytes, tile walk, timeline, bank conflicts."""
    if precision:
        _precision(json)
        return
    from tilewise.model import TilePlan

    rows, keys = parse_tile(tile) or (64, 32)
    schedules = [name.strip() for name in schedule.split(",")]
    _simulate(problem, TilePlan(rows, keys, stages=stages), schedules, sram, json)


def _simulate(problem: Problem, tile: TilePlan, schedules: list[str], sram: int | None, json: bool) -> None:
    from tilewise import model
    from tilewise.errors import ArgumentError
    from tilewise.hardware import lookup
    from tilewise.lab.simulator import random_inputs, simulate
    from tilewise.lab.simulator.exact import largest_error
    from tilewise.lab.simulator.show import simulation
    from tilewise.model.show import describe_problem

    scores = problem.heads * problem.seqlen_q * problem.seqlen_k
    if scores > MOST_SCORES:
        raise ArgumentError(
            f"seqlen: {scores:,} scores are too many to run literally, need at most {MOST_SCORES:,}; "
            "`tilewise plan` counts the bytes of any size"
        )
    inputs = random_inputs(problem)
    runs, models = [], []
    for name in schedules:
        kind, _, form = name.partition(":")
        used = replace(tile, splits=DECODE_SPLITS, pack_gqa=True) if kind == "decode" else tile
        runs.append(simulate(problem, used, kind, form=form or "unnormalised", inputs=inputs, sram=sram))
        if kind == "standard3":
            models.append(model.standard(problem, used, kernels=3))
        else:
            models.append(model.traffic(problem, used, kind))
    errors = [largest_error(run, inputs) for run in runs]
    data = [
        {**run.to_dict(), "model": model.to_dict(), "agrees": run.traffic == model, "error": error}
        for run, model, error in zip(runs, models, errors, strict=True)
    ]
    output(simulation(runs, models, errors, lookup(TIMELINE_DEVICE), describe_problem(problem)), data, json)


def _precision(json: bool) -> None:
    from tilewise.lab.simulator import precision
    from tilewise.lab.simulator.show import precision as table

    results = precision.experiment()
    output(table(results), [asdict(result) for result in results], json)
