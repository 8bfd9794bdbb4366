"""A plan as a person reads it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tilewise.masks import UNBOUNDED, Literal, MaskProgram
from tilewise.model.tables import Folded
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.model.decide import Plan

_BAR, _BAR_WIDTH = "█", 24
_TAKEN = ("chosen", "yours")
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def amount(size: float) -> str:
    """Bytes with a binary unit, three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale or unit == "µs":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError


def rate(flops: float) -> str:
    scale, unit = (1e12, "TFLOP/s") if flops >= 1e12 else (1e9, "GFLOP/s")
    return f"{flops / scale:.3g} {unit}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def problem_line(problem: Problem) -> str:
    """One line: batch × heads × lengths × dims, dtype, mask."""
    heads = f"{problem.heads}" if problem.kv_heads == problem.heads else f"{problem.heads}/{problem.kv_heads}"
    same = problem.seqlen_q == problem.seqlen_k
    length = (
        f"{problem.seqlen_q}"
        if same
        else f"{problem.seqlen_q} {'query' if problem.seqlen_q == 1 else 'queries'}, {problem.seqlen_k} keys"
    )
    dims = (
        f"{problem.head_dim}" if problem.head_dim == problem.head_dim_v else f"{problem.head_dim}/{problem.head_dim_v}"
    )
    parts = [f"batch {problem.batch}", f"heads {heads}", f"length {length}", f"head dim {dims}", _SHORT[problem.dtype]]
    return " · ".join([*parts, mask_words(problem.program)])


def mask_words(program: MaskProgram) -> str:
    """The mask as it was built, term by term."""
    if not program.structure:
        return "no mask"
    return " | ".join(" & ".join(_literal_words(literal) for literal in term) for term in program.terms())


def _literal_words(literal: Literal) -> str:
    kind, ints, _ = literal
    if kind.is_band:
        lo, hi = ints
        where = " at an offset" if kind.is_offset else "" if kind.is_bottom_right else " from the top left"
        if lo <= -UNBOUNDED:
            return ("causal" if hi == 0 else f"up to {hi:+d}") + where
        if hi >= UNBOUNDED:
            return f"from {lo:+d} on" + where
        return (f"window({1 - lo})" if hi == 0 else f"window({-lo}, {hi})") + where
    if kind.is_range:
        return f"prefix({ints[1]})" if ints[0] <= 0 else f"keys {ints[0]}…{ints[1] - 1}"
    if kind.is_padding:
        return "key padding"
    if not kind.reads_data:
        return "nothing"
    return "~" * kind.negated + ("documents" if kind.is_documents else "blocks" if kind.is_blocks else "dense")


def render(plan: Plan) -> RenderableType:
    """The plan as panels and tables."""
    return Group(_headline(plan), _traffic_table(plan), _limits_table(plan), *_alternatives_table(plan), _why(plan))


def as_text(plan: Plan) -> str:
    """The same without colours."""
    out = Console(file=io.StringIO(), width=110, color_system=None)
    out.print(render(plan))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def _headline(plan: Plan) -> RenderableType:
    tile, spec = plan.tile, plan.spec
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    how = tile.pass_.replace("backward_dkdv", "backward dK, dV").replace("backward_dq", "backward dQ")
    if plan.cpu:
        cpu = plan.cpu
        shape = f"register tile {cpu.rows}×{cpu.key_unroll}, K/V {'packed ' if cpu.packed else ''}in {cpu.resident}"
    else:
        shape = f"{tile.stages} stages · {tile.warps} warps · {plan.resident} resident a unit"
    if tile.splits > 1:
        shape += f" · {tile.splits} splits"
    if tile.pack_gqa:
        shape += " · grouped heads share a tile"
    grid.add_row("problem", problem_line(plan.problem))
    grid.add_row("device", f"{spec.name} · {spec.units} {'SMs' if spec.vendor == 'NVIDIA' else 'units'} · {spec.arch}")
    grid.add_row("tile", Text.assemble((f"{tile}", "bold cyan"), f"  {shape}  ({how}, {tile.source})"))
    buffers = ", ".join(f"{name} {amount(size)}" for name, size in plan.on_chip.items())
    grid.add_row("on chip", f"{amount(plan.on_chip_bytes)}  ({buffers}) · {plan.registers} registers")
    grid.add_row(
        "predicted",
        Text.assemble(
            (duration(plan.seconds), "bold green"),
            f"  {rate(plan.flops_per_second)} useful, bound by ",
            (plan.binding, "bold yellow"),
        ),
    )
    roof = plan.roofline
    grid.add_row(
        "roofline",
        f"{_plain(roof.intensity)} FLOP/B against a ridge of {_plain(roof.ridge)}: {roof.bound} side, "
        f"{rate(roof.attainable)} attainable",
    )
    return Panel(grid, title="plan", title_align="left", border_style="cyan", box=box.ROUNDED)


def _traffic_table(plan: Plan) -> RenderableType:
    table = Table(title="traffic", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tensor")
    for head in ("compulsory", "tile (from L2)", "DRAM", "times read"):
        table.add_column(head, justify="right", no_wrap=True)
    least, tile, dram = plan.compulsory, plan.tile_traffic, plan.dram
    for name, read, written in tile.tensors():
        once = least.reads[name] + least.writes[name]
        moved = read + written
        again = f"{moved / once:.3g}×" if once else "–"
        table.add_row(
            name, amount(once) if once else "–", amount(moved), amount(dram.reads[name] + dram.writes[name]), again
        )
    table.add_section()
    table.add_row(
        "all", amount(least.total), amount(tile.total), amount(dram.total), f"{tile.total / least.total:.3g}×"
    )
    return Folded(table)


def _limits_table(plan: Plan) -> RenderableType:
    table = Table(
        title="time by resource", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("resource")
    table.add_column("alone", justify="right")
    table.add_column("of the predicted time")
    for name, seconds in sorted(plan.limits.items(), key=lambda item: -item[1]):
        share = seconds / plan.seconds if plan.seconds else 0.0
        bar = Text(_BAR * max(1, round(share * _BAR_WIDTH)), style="yellow" if name == plan.binding else "blue")
        table.add_row(name, duration(seconds), Text.assemble(bar, f" {share:.0%}"))
    return table


def _alternatives_table(plan: Plan, most: int = 6) -> Sequence[RenderableType]:
    if not plan.alternatives:
        return []
    table = Table(
        title="tiles considered", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for head, justify in (("tile", "left"), ("stages", "right"), ("warps", "right"), ("on chip", "right")):
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("registers", justify="right", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("verdict")
    running = [a for a in plan.alternatives if a.seconds is not None]
    chosen = [a for a in running if a.verdict in _TAKEN]
    shown = sorted(
        [*chosen, *[a for a in running if a.verdict not in _TAKEN][: most - 1]], key=lambda a: a.seconds or 0.0
    )
    failing = sorted((a for a in plan.alternatives if a.seconds is None), key=lambda a: a.tile.block_q * a.tile.block_k)
    for a in [*shown, *failing[:4]]:
        style = "bold cyan" if a.verdict in _TAKEN else "dim" if a.seconds is None else ""
        when = duration(a.seconds) if a.seconds is not None else "–"
        cells = (
            str(a.tile),
            str(a.tile.stages),
            str(a.tile.warps),
            amount(a.sram_bytes),
            str(a.registers),
            when,
            a.verdict,
        )
        table.add_row(*cells, style=style)
    rest = len(running) - len(shown)
    left = len(failing) - min(4, len(failing))
    note = Text(f"{rest} slower and {left} larger tiles not shown", style="dim") if rest + left else Text("")
    return [Folded(table), note]


def _why(plan: Plan) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for reason in plan.reasons:
        grid.add_row(Text(" •", style="cyan"), Text(reason))
    return Group(Text("\nwhy", style="bold"), grid)


def comparison(plans: Sequence[Plan]) -> RenderableType:
    """One problem on several machines, side by side."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("device", "tile"):
        table.add_column(head, no_wrap=True)
    for head in ("predicted", "useful rate"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for head in ("on chip", "stages", "warps", "tile bytes", "DRAM bytes"):
        table.add_column(head, justify="right", no_wrap=True)
    fastest = min((plan.seconds for plan in plans), default=0.0)
    for plan in plans:
        gpu = plan.spec.is_gpu
        table.add_row(
            plan.spec.key,
            str(plan.tile),
            duration(plan.seconds),
            rate(plan.flops_per_second),
            plan.binding,
            amount(plan.on_chip_bytes),
            str(plan.tile.stages) if gpu else "–",
            str(plan.tile.warps) if gpu else "–",
            amount(plan.tile_traffic.total),
            amount(plan.dram.total),
            style="bold green" if plan.seconds == fastest else "",
        )
    title = Text(problem_line(plans[0].problem), style="bold") if plans else Text("")
    return Group(title, Folded(table))
