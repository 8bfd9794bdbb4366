"""`tilewise plan`: the tile for a problem on a machine, its traffic, its predicted time, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tilewise.cli.console import Json, console, print_json

Seqlen = Annotated[int, typer.Option(help="Queries (and keys, unless --kv-seqlen).")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
HeadDim = Annotated[int, typer.Option(help="Head dimension.")]
Batch = Annotated[int, typer.Option(help="Sequences.")]
KvHeads = Annotated[int | None, typer.Option(help="Key and value heads, if fewer.")]
KvSeqlen = Annotated[int | None, typer.Option(help="Keys, if not as many as queries.")]
Mask = Annotated[str | None, typer.Option(help="For example 'causal & window(4096)'.")]
Dtype = Annotated[str, typer.Option(help="fp16, bf16, fp32 or fp64.")]
Device = Annotated[str | None, typer.Option(help="A catalogued machine such as h200; default: this one.")]
Pass = Annotated[str, typer.Option("--pass", help="auto, forward, decode, backward_dkdv or backward_dq.")]
Tile = Annotated[str | None, typer.Option(help="Your own tile, such as 128x64; its cost is shown beside ours.")]

SEQLEN, HEADS, HEAD_DIM, DTYPE = 4096, 16, 128, "bf16"
"""The problem that `plan` and `explain` take if nothing is said."""


def plan_command(
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
    all_devices: Annotated[bool, typer.Option("--all-devices", help="Every catalogued machine side by side.")] = False,
    json: Json = False,
) -> None:
    """Choose the tile for a problem and say what it moves, how long it should take, and why."""
    from tilewise.model import plan
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
    if all_devices:
        _everywhere(problem, pass_, json)
        return
    found = plan(problem, device, pass_=pass_, tile=parse_tile(tile))
    if json:
        print_json(found.to_dict())
    else:
        console().print(found)


def _everywhere(problem: Any, pass_: str, json: bool) -> None:
    from tilewise.errors import PlanError
    from tilewise.hardware import catalogue
    from tilewise.model import plan
    from tilewise.model.show import comparison

    plans, impossible = [], {}
    for key, spec in catalogue().items():
        try:
            plans.append(plan(problem, spec, pass_=pass_ if spec.is_gpu else "auto"))
        except PlanError as error:
            impossible[key] = str(error)
    if json:
        print_json({"plans": [found.to_dict() for found in plans], "impossible": impossible})
        return
    out = console()
    out.print(comparison(plans))
    for key, why in impossible.items():
        out.print(f"[dim]{key}: {why}[/]")


def parse_mask(text: str | None) -> Any:
    """The mask of a command line, None for none."""
    from tilewise.masks import parse

    return parse(text) if text else None


def parse_tile(text: str | None) -> tuple[int, int] | None:
    """`128x64` as (128, 64)."""
    from tilewise.errors import PlanError

    if text is None:
        return None
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise PlanError(f"tile: got {text!r}, need rows and keys such as 128x64")
    m, n = (int(part) for part in parts)
    return m, n
