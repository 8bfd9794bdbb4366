"""`tilewise simulate`: run a schedule literally on a small problem and count every byte."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import Json, console, print_json
from tilewise.cli.plan import parse_mask, parse_tile

if TYPE_CHECKING:
    from tilewise.model import TilePlan
    from tilewise.problem import Problem

MOST_SCORES = 2**22
DECODE_SPLITS = 4
TIMELINE_DEVICE = "a100"


def simulate_command(
    schedule: Annotated[
        str,
        typer.Option(
            help="standard, standard3, v1, v2, decode, backward or backward_fused; several with commas; "
            "v1:normalised and v2:normalised take the other form of the softmax."
        ),
    ] = "v2",
    seqlen: Annotated[int, typer.Option(help="Queries (and keys, unless --kv-seqlen).")] = 256,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 1,
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 64,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads, if fewer.")] = None,
    kv_seqlen: Annotated[int | None, typer.Option(help="Keys, if not as many as queries.")] = None,
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32 or fp64: what elements are charged at.")] = "fp16",
    mask: Annotated[str | None, typer.Option(help="For example 'causal & window(32)'.")] = None,
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
    from tilewise.problem import Problem

    problem = Problem.of(
        heads=heads,
        kv_heads=kv_heads,
        seqlen=seqlen,
        kv_seqlen=kv_seqlen,
        head_dim=head_dim,
        dtype=dtype,
        mask=parse_mask(mask),
    )
    rows, keys = parse_tile(tile) or (64, 32)
    plan = TilePlan(rows, keys, stages=stages)
    _simulate(problem, plan, [name.strip() for name in schedule.split(",")], sram, json)


def _simulate(problem: Problem, tile: TilePlan, schedules: list[str], sram: int | None, json: bool) -> None:
    from tilewise import model
    from tilewise.errors import ArgumentError
    from tilewise.hardware import lookup
    from tilewise.lab.simulator import random_inputs, simulate
    from tilewise.lab.simulator.check import largest_error
    from tilewise.lab.simulator.show import simulation
    from tilewise.model.show import problem_line

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
        taken = replace(tile, splits=DECODE_SPLITS, pack_gqa=True) if kind == "decode" else tile
        runs.append(simulate(problem, taken, kind, form=form or "unnormalised", inputs=inputs, sram=sram))
        if kind == "standard3":
            models.append(model.standard(problem, taken, kernels=3))
        else:
            models.append(model.traffic(problem, taken, kind))
    errors = [largest_error(run, inputs) for run in runs]
    if json:
        print_json(
            [
                {**run.to_dict(), "model": model.to_dict(), "agrees": run.traffic == model, "error": error}
                for run, model, error in zip(runs, models, errors, strict=True)
            ]
        )
    else:
        console().print(simulation(runs, models, errors, lookup(TIMELINE_DEVICE), problem_line(problem)))


def _precision(json: bool) -> None:
    from tilewise.lab.simulator import precision
    from tilewise.lab.simulator.show import precision as table

    results = precision.experiment()
    if json:
        print_json([result.to_dict() for result in results])
    else:
        console().print(table(results))
