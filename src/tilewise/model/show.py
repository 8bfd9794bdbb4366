"""A plan as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewise.display import (
    Cell,
    Group,
    Panel,
    Shown,
    Span,
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
from tilewise.model.tile import AS_FAST, PLAIN, RESOLUTION
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.model.decide import Plan
    from tilewise.model.tile import TilePlan

_CHOSEN = ("chosen", "yours")
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_PASSES = {
    "backward_dkdv": "backward dK, dV",
    "backward_dq": "backward dQ",
    "backward_dbias": "backward dBias",
    "backward_preprocess": "preprocess",
    "backward_postprocess": "postprocess",
}
SMALL_BUFFER = 0.03
"""Of the on-chip bytes: smaller buffers are not named."""
MOST_SLOWER, MOST_LARGER = 5, 4
"""Tiles shown that run slower than the chosen one, and that do not fit."""


def describe_problem(problem: Problem) -> str:
    """One line: batch, heads, lengths, dims, dtype and precision, mask."""
    heads = f"{problem.heads}" if problem.kv_heads == problem.heads else f"{problem.heads}/{problem.kv_heads}"
    length = f"{problem.seqlen_q}"
    if problem.seqlen_q != problem.seqlen_k:
        length += f" {'query' if problem.seqlen_q == 1 else 'queries'}, {problem.seqlen_k} keys"
    same = problem.head_dim == problem.head_dim_v
    dims = f"{problem.head_dim}" if same else f"{problem.head_dim}/{problem.head_dim_v}"
    batch = f"{problem.batch} packed sequences" if problem.varlen else f"batch {problem.batch}"
    dtype = _SHORT[problem.dtype] + ("" if problem.precision == "default" else f" ({problem.precision})")
    parts = [batch, f"heads {heads}", f"length {length}", f"head dim {dims}", dtype]
    return " · ".join([*parts, describe_mask(problem.program)])


def describe_roofline(plan: Plan) -> str:
    roof = plan.roofline
    return (
        f"{format_number(roof.intensity)} FLOP/B, ridge {format_number(roof.ridge)}: {roof.bound} side, "
        f"{format_count(roof.attainable, 'FLOP/s')} attainable"
    )


def show_plan(plan: Plan) -> Shown:
    tables: list[Shown] = [pass_table(plan.passes)] if plan.passes else []
    if plan.timed:
        tables += [traffic_table(plan), resource_table(plan), *_alternatives(plan)]
    return Group(_headline(plan), *tables, bullets("why", plan.reasons))


def _headline(plan: Plan) -> Shown:
    spec = plan.spec
    rows: list[tuple[str, Cell]] = [
        ("problem", describe_problem(plan.problem)),
        ("device", f"{spec.name} · {spec.units} {'SMs' if spec.vendor == 'NVIDIA' else 'units'} · {spec.arch}"),
    ]
    if plan.backend is not None:
        rows.append(("backend", (plan.backend, "bold cyan")))
    rows += [*figure_facts(plan), ("tile", [(f"{plan.tile}", "bold cyan"), f"  {describe_tile(plan)}"])]
    if plan.timed:
        rows.append(("on chip", describe_on_chip(plan)))
        rows += time_facts(plan)
    return Panel("plan", facts(rows))


def describe_on_chip(plan: Plan) -> str:
    """Bytes and registers, with what there is."""
    spec, size, registers = plan.spec, format_bytes(plan.on_chip_bytes), plan.registers
    if spec.is_gpu:
        size += f" of {format_bytes(spec.sram_per_block)}"
    most = spec.max_registers if spec.is_gpu else spec.vector_registers
    return f"{size}  ({_buffers(plan)}) · {registers} of {most} registers"


def _buffers(plan: Plan) -> str:
    """What is on the chip, the small buffers together."""
    large = {name: size for name, size in plan.on_chip.items() if size >= SMALL_BUFFER * plan.on_chip_bytes}
    if rest := plan.on_chip_bytes - sum(large.values()):
        large[f"{len(plan.on_chip) - len(large)} more"] = rest
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in large.items())


def figure_facts(plan: Plan) -> list[tuple[str, Cell]]:
    """Whose the figures are, where they are not those of the backend's own kernels."""
    if plan.backend is None:
        return []
    if not plan.passes:
        return [("figures", f"the model's: {plan.backend} has no tile of ours")]
    if not plan.timed:
        return [
            ("figures", f"tile and FLOPs; {plan.backend} computes with torch, whose bytes and time are not modelled")
        ]
    return []


def time_facts(plan: Plan) -> list[tuple[str, Cell]]:
    rate = format_count(plan.flops_per_second, "FLOP/s")
    bound: list[Span] = [(format_seconds(plan.seconds), "bold green"), f"  {rate} useful, bound by "]
    bound += [(plan.binding, "bold yellow"), (f"  ({plan.ceilings})", "dim")]
    return [("predicted", bound), ("roofline", describe_roofline(plan))]


def describe_tile(plan: Plan) -> str:
    """What belongs to a tile beside its sizes."""
    tile = plan.tile
    if tile.register_tile is not None:
        parts = ["register tile {}×{}".format(*tile.register_tile)]
    elif plan.spec.is_gpu and plan.timed:
        parts = [f"{tile.stages} stages", f"{tile.warps} warps", f"{plan.resident} resident a unit"]
    else:
        parts = []
    heads = tile.heads * tile.groups
    parts += [f"{heads} heads a task"] if heads > 1 else []
    parts += [f"{tile.splits} splits"] if tile.splits > 1 else []
    parts += ["grouped heads share a tile"] if tile.pack_gqa else []
    return f"{' · '.join(parts)}{'  ' * bool(parts)}({_PASSES.get(tile.pass_, tile.pass_)}, {tile.source})"


def pass_table(passes: Sequence[TilePlan]) -> Table:
    """The kernels of a call, a row each."""
    rows: list[list[Cell]] = []
    for tile in passes:
        register = tile.register_tile
        held = "–" if tile.kernel == PLAIN else f"{register[0]}×{register[1]}" if register else str(tile.warps)
        on_chip = format_bytes(tile.on_chip_bytes) if tile.on_chip else "–"
        name = _PASSES.get(tile.pass_, tile.pass_)
        rows.append([name, tile.kernel or "–", (f"{tile}", "cyan"), held, str(tile.stages), on_chip, str(tile.splits)])
    held = "register tile" if any(tile.register_tile for tile in passes) else "warps"
    return Table("kernels", ("pass", "kernel", "tile", held, "stages", "on chip", "splits"), rows, left=2, wraps=(0, 1))


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
    shown = [*(a for a in running if a.verdict in _CHOSEN), *slower]
    failing = sorted((a for a in plan.alternatives if a.seconds is None), key=lambda a: a.tile.block_q * a.tile.block_k)
    rows = []
    for a in [*shown, *failing[:MOST_LARGER]]:
        style = "bold cyan" if a.verdict in _CHOSEN else "dim" if a.seconds is None else ""
        sizes = (str(a.tile.stages), str(a.tile.warps), format_bytes(a.sram_bytes), str(a.registers))
        rows.append(styled(style, str(a.tile), *sizes, format_seconds(a.seconds), a.verdict))
    columns = ("tile", "stages", "warps", "on chip", "registers", "predicted", "verdict")
    table = Table("tiles considered", columns, rows, wraps=(6,))
    hidden, larger = len(running) - len(shown), max(0, len(failing) - MOST_LARGER)
    notes = [f"{hidden} slower and {larger} larger tiles not shown"] if hidden + larger else []
    if any(a.verdict == AS_FAST for a in shown):
        notes.append(f"the model does not tell times apart that differ by less than {RESOLUTION:.0%}")
    return [table, *(Text((note, "dim")) for note in notes)]


def show_comparison(plans: Sequence[Plan]) -> Shown:
    """One problem on several machines, side by side."""
    columns = (
        "device", "backend", "tile", "predicted", "rate", "bound by", "on chip", "stages", "warps", "tile bytes", "HBM bytes",
    )  # fmt: skip
    fastest = min((plan.seconds for plan in plans if plan.timed), default=0.0)
    rows = []
    for plan in plans:
        gpu = plan.spec.is_gpu and plan.timed
        figures = [
            format_seconds(plan.seconds),
            format_count(plan.flops_per_second, "FLOP/s"),
            plan.binding,
            format_bytes(plan.on_chip_bytes),
            str(plan.tile.stages) if gpu else "–",
            str(plan.tile.warps) if gpu else "–",
            format_bytes(plan.tile_traffic.total),
            format_bytes(plan.dram.total),
        ]
        figures = figures if plan.timed else ["–"] * len(figures)
        style = "bold green" if plan.timed and plan.seconds == fastest else ""
        rows.append(styled(style, plan.spec.key, plan.backend or "none", str(plan.tile), *figures))
    return Table(describe_problem(plans[0].problem) if plans else "", columns, rows, left=3, wraps=(5,))
