"""`tilewise simulate`: run a schedule literally on a small problem and count every byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import Json, console, print_json
from tilewise.cli.plan import parse_mask

if TYPE_CHECKING:
    from tilewise.problem import Problem

MOST_SCORES = 2**22


def simulate_command(
    schedule: Annotated[
        str, typer.Option(help="standard, standard3, v1, v2, decode, backward, backward_fused; several with commas.")
    ] = "v2",
    seqlen: Annotated[int, typer.Option(help="Queries (and keys, unless --kv-seqlen).")] = 256,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 1,
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads, if fewer.")] = None,
    kv_seqlen: Annotated[int | None, typer.Option(help="Keys, if not as many as queries.")] = None,
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32 or fp64: what elements are charged at.")] = "fp16",
    mask: Annotated[str | None, typer.Option(help="For example 'causal & window(32)'.")] = None,
    block_q: Annotated[int, typer.Option(help="Query rows of a tile.")] = 64,
    block_k: Annotated[int, typer.Option(help="Keys of a tile.")] = 32,
    stages: Annotated[int, typer.Option(help="K/V tiles in flight.")] = 2,
    splits: Annotated[int, typer.Option(help="Parts of the keys, for decode.")] = 1,
    form: Annotated[str, typer.Option(help="Online softmax: unnormalised or normalised.")] = "unnormalised",
    sram: Annotated[int | None, typer.Option(help="On-chip bytes; too few are an error.")] = None,
    device: Annotated[str, typer.Option(help="Whose unit the timeline is drawn for.")] = "a100",
    precision: Annotated[bool, typer.Option("--precision", help="The precision experiment instead.")] = False,
    json: Json = False,
) -> None:
    """Run attention schedules literally on a small problem: bytes, tile walk, timeline, bank conflicts."""
    if precision:
        _precision(json)
        return
    from tilewise.iomodel import TilePlan
    from tilewise.problem import Problem

    problem = Problem.of(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen=seqlen,
        kv_seqlen=kv_seqlen,
        head_dim=head_dim,
        dtype=dtype,
        mask=parse_mask(mask),
    )
    tile = TilePlan(block_q, block_k, stages=stages, splits=splits, pack_gqa=splits > 1)
    _simulate(problem, tile, [name.strip() for name in schedule.split(",")], form, sram, device, json)


def _simulate(
    problem: Problem, tile: Any, schedules: list[str], form: str, sram: int | None, device: str, json: bool
) -> None:
    from tilewise import iomodel
    from tilewise.errors import ArgumentError
    from tilewise.hardware import device as find_device
    from tilewise.planner.show import problem_line
    from tilewise.simulator import random_inputs, simulate
    from tilewise.simulator.check import largest_error
    from tilewise.simulator.show import simulation

    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    if scores > MOST_SCORES:
        raise ArgumentError(
            f"seqlen: {scores:,} scores are too many to run literally, need at most {MOST_SCORES:,}; "
            "`tilewise plan` counts the bytes of any size"
        )
    inputs = random_inputs(problem)
    runs = [simulate(problem, tile, name, form=form, inputs=inputs, sram=sram) for name in schedules]
    models = [
        iomodel.standard(problem, tile, kernels=3)
        if run.schedule == "standard3"
        else iomodel.traffic(problem, tile, run.schedule)
        for run in runs
    ]
    errors = [largest_error(run, inputs) for run in runs]
    spec = find_device(device)
    if json:
        print_json(
            [
                {**run.to_dict(), "model": model.to_dict(), "agrees": run.traffic == model, "error": error}
                for run, model, error in zip(runs, models, errors, strict=True)
            ]
        )
    else:
        console().print(simulation(runs, models, errors, spec, problem_line(problem)))


def _precision(json: bool) -> None:
    from tilewise.simulator import precision
    from tilewise.simulator.show import precision as table

    results = precision.experiment()
    if json:
        print_json([result.to_dict() for result in results])
    else:
        console().print(table(results))
