"""A plan as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewise.display import (
    Cell,
    Group,
    Panel,
    Shown,
    Table,
    Text,
    bars,
    bullets,
    facts,
    format_bytes,
    format_count,
    format_number,
    format_seconds,
    styled,
)
from tilewise.masks import describe_mask
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.model.decide import Plan

_CHOSEN = ("chosen", "yours")
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_PASSES = {"backward_dkdv": "backward dK, dV", "backward_dq": "backward dQ"}
MOST_SLOWER, MOST_LARGER = 5, 4
"""Tiles shown that run slower than the chosen one, and that do not fit."""


def describe_problem(problem: Problem) -> str:
    """One line: batch, heads, lengths, dims, dtype, mask."""
    heads = f"{problem.heads}" if problem.kv_heads == problem.heads else f"{problem.heads}/{problem.kv_heads}"
    length = f"{problem.seqlen_q}"
    if problem.seqlen_q != problem.seqlen_k:
        length += f" {'query' if problem.seqlen_q == 1 else 'queries'}, {problem.seqlen_k} keys"
    same = problem.head_dim == problem.head_dim_v
    dims = f"{problem.head_dim}" if same else f"{problem.head_dim}/{problem.head_dim_v}"
    batch = f"{problem.batch} packed sequences" if problem.varlen else f"batch {problem.batch}"
    parts = [batch, f"heads {heads}", f"length {length}", f"head dim {dims}", _SHORT[problem.dtype]]
    return " · ".join([*parts, describe_mask(problem.program)])


def describe_roofline(plan: Plan) -> str:
    roof = plan.roofline
    return (
        f"{format_number(roof.intensity)} FLOP/B, ridge {format_number(roof.ridge)}: {roof.bound} side, "
        f"{format_count(roof.attainable, 'FLOP/s')} attainable"
    )


def show_plan(plan: Plan) -> Shown:
    tables = [traffic_table(plan), resource_table(plan), *_alternatives(plan)]
    return Group(_headline(plan), *tables, bullets("why", plan.reasons))


def _headline(plan: Plan) -> Shown:
    tile, spec = plan.tile, plan.spec
    if tile.register_tile:
        shape = f"register tile {tile.register_tile[0]}×{tile.register_tile[1]}"
    else:
        shape = f"{tile.stages} stages · {tile.warps} warps · {plan.resident} resident a unit"
    if tile.splits > 1:
        shape += f" · {tile.splits} splits"
    if tile.pack_gqa:
        shape += " · grouped heads share a tile"
    buffers = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.on_chip.items())
    useful = f"  {format_count(plan.flops_per_second, 'FLOP/s')} useful, bound by "
    rows = facts(
        [
            ("problem", describe_problem(plan.problem)),
            ("device", f"{spec.name} · {spec.units} {'SMs' if spec.vendor == 'NVIDIA' else 'units'} · {spec.arch}"),
            ("tile", [(f"{tile}", "bold cyan"), f"  {shape}  ({_PASSES.get(tile.pass_, tile.pass_)}, {tile.source})"]),
            ("on chip", f"{format_bytes(plan.on_chip_bytes)}  ({buffers}) · {plan.registers} registers"),
            ("predicted", [(format_seconds(plan.seconds), "bold green"), useful, (plan.binding, "bold yellow")]),
            ("roofline", describe_roofline(plan)),
        ]
    )
    return Panel("plan", rows)


def traffic_table(plan: Plan) -> Table:
    least, dram, moved = plan.compulsory, plan.dram, plan.tile_traffic
    sizes = {name: [t.reads[name] + t.writes[name] for t in (least, dram, moved)] for name, _, _ in moved.tensors()}
    rows: list[Sequence[Cell] | None] = []
    for name, amounts in {**sizes, "all": [least.total, dram.total, moved.total]}.items():
        again = f"{amounts[2] / amounts[0]:.3g}×" if amounts[0] else "–"
        rows.append([name, *(format_bytes(amount) if amount else "–" for amount in amounts), again])
    rows.insert(-1, None)
    return Table("bytes by tensor", ("tensor", "at least", "HBM", "cache to units", "times read"), rows)


def resource_table(plan: Plan) -> Table:
    limits = dict(sorted(plan.limits.items(), key=lambda item: -item[1]))
    styles = {"": "blue", plan.binding: "yellow"}
    return bars("time by resource", ("resource", "alone", "of the predicted time"), limits, plan.seconds, styles)


def _alternatives(plan: Plan) -> Sequence[Shown]:
    if not plan.alternatives:
        return []
    running = [a for a in plan.alternatives if a.seconds is not None]
    slower = [a for a in running if a.verdict not in _CHOSEN][:MOST_SLOWER]
    shown = sorted([*(a for a in running if a.verdict in _CHOSEN), *slower], key=lambda a: a.seconds or 0.0)
    failing = sorted((a for a in plan.alternatives if a.seconds is None), key=lambda a: a.tile.block_q * a.tile.block_k)
    rows = []
    for a in [*shown, *failing[:MOST_LARGER]]:
        style = "bold cyan" if a.verdict in _CHOSEN else "dim" if a.seconds is None else ""
        sizes = (str(a.tile.stages), str(a.tile.warps), format_bytes(a.sram_bytes), str(a.registers))
        rows.append(styled(style, str(a.tile), *sizes, format_seconds(a.seconds), a.verdict))
    columns = ("tile", "stages", "warps", "on chip", "registers", "predicted", "verdict")
    table = Table("tiles considered", columns, rows, wraps=(6,))
    hidden, larger = len(running) - len(shown), max(0, len(failing) - MOST_LARGER)
    note = Text((f"{hidden} slower and {larger} larger tiles not shown", "dim"))
    return [table, note] if hidden + larger else [table]


def show_comparison(plans: Sequence[Plan]) -> Shown:
    """One problem on several machines, side by side."""
    columns = (
        "device", "tile", "predicted", "rate", "bound by", "on chip", "stages", "warps", "tile bytes", "HBM bytes",
    )  # fmt: skip
    fastest = min((plan.seconds for plan in plans), default=0.0)
    rows = [
        styled(
            "bold green" if plan.seconds == fastest else "",
            plan.spec.key,
            str(plan.tile),
            format_seconds(plan.seconds),
            format_count(plan.flops_per_second, "FLOP/s"),
            plan.binding,
            format_bytes(plan.on_chip_bytes),
            str(plan.tile.stages) if plan.spec.is_gpu else "–",
            str(plan.tile.warps) if plan.spec.is_gpu else "–",
            format_bytes(plan.tile_traffic.total),
            format_bytes(plan.dram.total),
        )
        for plan in plans
    ]
    return Table(describe_problem(plans[0].problem) if plans else "", columns, rows, left=2, wraps=(4,))
