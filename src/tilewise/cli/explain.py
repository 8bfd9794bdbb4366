"""`tilewise explain`: which backend and plan a problem gets, why not the others, and where its time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from tilewise.cli.console import Json, console, print_json
from tilewise.cli.plan import (
    DTYPE,
    HEAD_DIM,
    HEADS,
    SEQLEN,
    Batch,
    Device,
    Dtype,
    HeadDim,
    Heads,
    KvHeads,
    KvSeqlen,
    Mask,
    Pass,
    Seqlen,
    Tile,
    parse_mask,
    parse_tile,
)

if TYPE_CHECKING:
    from tilewise.api.names import BackendName


def explain_command(
    seqlen: Seqlen = SEQLEN,
    heads: Heads = HEADS,
    head_dim: HeadDim = HEAD_DIM,
    batch: Batch = 1,
    kv_heads: KvHeads = None,
    kv_seqlen: KvSeqlen = None,
    dtype: Dtype = DTYPE,
    mask: Mask = None,
    device: Device = None,
    pass_: Pass = "auto",
    tile: Tile = None,
    backend: Annotated[str, typer.Option(help="auto, or one by name.")] = "auto",
    measure: Annotated[bool, typer.Option("--measure", help="Run it, and name what keeps it from the roof.")] = False,
    json: Json = False,
) -> None:
    """Say which backend and plan a problem gets and why, what it moves, and what bounds it."""
    from tilewise.diagnostics.explain import explain
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
    found = explain(
        problem,
        device=device,
        backend=cast("BackendName", backend),
        tile=parse_tile(tile),
        pass_=pass_,
        measure=measure,
    )
    if json:
        print_json(found.to_dict())
    else:
        console().print(found)
