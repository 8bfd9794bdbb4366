"""A simulation as a person reads it: counts, the tile walk, the timeline, bank conflicts, the precision experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tilewise.hardware.spec import DeviceSpec
from tilewise.lab.simulator.banks import layouts, tile_conflicts
from tilewise.lab.simulator.device import Simulation
from tilewise.lab.simulator.precision import Result
from tilewise.lab.simulator.timeline import Timeline, block_timeline
from tilewise.masks import TileMap
from tilewise.model.schedules import Traffic
from tilewise.model.tables import Fitted, Folded

_WALK_ROWS, _WALK_WIDTH, _LINE_WIDTH = 40, 110, 78
"""Rows of tiles, and characters of a walk and of a timeline, drawn at most."""
_FILL = {"load": "░", "compute": "▓"}


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    return table


def counts(runs: Sequence[Simulation], models: Sequence[Traffic], errors: Sequence[float]) -> RenderableType:
    """Bytes by tensor and direction of one or more schedules side by side, and what else they did."""
    names = dict.fromkeys(name for run in runs for name, _, _ in run.traffic.tensors())
    columns = [f"{run.schedule} {what}" for run in runs for what in ("reads", "writes")]
    table = _table("bytes by tensor", "tensor", *columns)
    for name in names:
        cells = [f"{n:,}" if n else "·" for run in runs for n in (run.traffic.reads[name], run.traffic.writes[name])]
        table.add_row(name, *cells)
    table.add_section()
    totals = [f"{n:,}" for run in runs for n in (run.traffic.total_read, run.traffic.total_written)]
    table.add_row("all", *totals, style="bold")
    facts = _table("what it did", "", *[run.schedule for run in runs])
    agree = [run.traffic == model for run, model in zip(runs, models, strict=True)]
    facts.add_row("bytes moved", *[f"{run.traffic.total:,}" for run in runs], style="bold")
    facts.add_row("IO model says", *[Text("the same", "green") if ok else Text("other", "bold red") for ok in agree])
    facts.add_row("largest error", *[f"{error:.1e}" for error in errors])
    facts.add_row("softmax updates", *[f"{run.counts.updates:,}" for run in runs])
    facts.add_row("of them rescaling", *[f"{run.counts.rescales:,}" for run in runs])
    facts.add_row("exponentials", *[f"{run.counts.exps:,}" for run in runs])
    facts.add_row("matrix FLOPs", *[f"{run.counts.flops:,}" for run in runs])
    facts.add_row("FLOPs a byte", *[f"{run.counts.flops / max(1, run.traffic.total):.2f}" for run in runs])
    facts.add_row("on chip, at most", *[f"{run.sram_peak:,}" if run.sram_peak else "streamed" for run in runs])
    return Group(Folded(table), Folded(facts))


def walk(run: Simulation) -> RenderableType:
    """The tiles of the first head, each with its place in the order they were visited; as many as there is room for."""
    return Fitted(lambda width: _walk(run, min(width, _WALK_WIDTH)))


def _walk(run: Simulation, room: int) -> RenderableType:
    problem, tile = run.problem, run.tile
    tiles = TileMap(problem.program, problem.shape, tile.block_q, tile.block_k)
    order: dict[tuple[int, int], int] = {}
    for visit in run.walk:
        if (visit.b, visit.h) == (0, 0):
            order.setdefault((visit.i, visit.j), len(order) + 1)
    width = max(2, len(str(len(order)))) + 2
    rows, cols = min(tiles.rows, _WALK_ROWS), min(tiles.cols, max(1, (room - len(_row_name(0))) // (width + 1)))
    text = Text()
    for i in range(rows):
        text.append(_row_name(i), style="dim")
        classes = tiles.row(i, 0, 0)
        for j in range(cols):
            number = order.get((i, j))
            style = ("dim", "black on yellow", "black on cyan")[classes[j]]
            label = "· " if number is None else f"{number}{'~' if classes[j] == 1 else ' '}"
            text.append(label.rjust(width), style=style)
            text.append(" ")
        text.append("\n")
    legend = Text.assemble(
        "  ", (" 1 full ", "black on cyan"), " ", (" 1~ partial ", "black on yellow"), ("  · empty, never read", "dim")
    )
    whole = (rows, cols) == (tiles.rows, tiles.cols)
    note = "" if whole else f" (first {rows}×{cols} of {tiles.rows}×{tiles.cols})"
    title = Text(f"tile walk of {run.schedule}, keys to the right{note}", style="bold")
    return Group(title, text, legend, Text(""))


def _row_name(i: int) -> str:
    return f"  Q{i:<3}"


def timelines(run: Simulation, spec: DeviceSpec) -> RenderableType:
    """The fullest query block's walk with one buffer and with two."""
    problem, tile = run.problem, run.tile
    tiles = TileMap(problem.program, problem.shape, tile.block_q, tile.block_k)
    fullest = max(range(tiles.rows), key=lambda i: len(tiles.key_blocks(i, 0, 0)), default=0)
    keys = [min(tile.block_k, problem.seqlen_k - j * tile.block_k) for j, _ in tiles.key_blocks(fullest, 0, 0)]
    rows = min(tile.block_q, problem.seqlen_q - fullest * tile.block_q)
    parts: list[RenderableType] = [Text(f"timeline of Q{fullest} on one unit of {spec.name}", style="bold")]
    single = _with_stages(run, keys, rows, spec, 1)
    for stages in sorted({1, max(2, tile.stages)}):
        line = single if stages == 1 else _with_stages(run, keys, rows, spec, stages)
        parts.append(Fitted(partial(_draw, line, single.total)))
    return Group(*parts, Text(""))


def _with_stages(run: Simulation, keys: list[int], rows: int, spec: DeviceSpec, stages: int) -> Timeline:
    return block_timeline(run.problem, replace(run.tile, stages=stages), keys, rows, spec)


def _draw(line: Timeline, full: float, room: int) -> RenderableType:
    """One row a buffer; loads light, computation dark, each with its tile's number where there is room."""
    name = "  buffer {} "
    width = max(1, min(_LINE_WIDTH, room - len(name)))
    scale = width / full if full else 0.0
    text = Text()
    for buffer in range(line.stages):
        cells: list[tuple[str, str]] = [(" ", "")] * (width + 1)
        for event in line.events:
            if event.buffer != buffer:
                continue
            first, last = round(event.start * scale), max(round(event.start * scale) + 1, round(event.end * scale))
            style = "black on yellow" if event.kind == "load" else "black on cyan"
            fill = _FILL[event.kind]
            label = f"{event.step}".center(last - first, fill) if last - first > 2 else fill * (last - first)
            for offset, ch in enumerate(label):
                if first + offset <= width:
                    cells[first + offset] = (ch, style)
        text.append(name.format(chr(65 + buffer)), style="dim")
        for ch, style in cells:
            text.append(ch, style=style)
        text.append("\n")
    saved = 1 - line.total / full if full else 0.0
    how = "one buffer" if line.stages == 1 else f"{line.stages} buffers"
    text.append(f"  {how}: {line.total * 1e6:.3g} µs, {line.overlap * 1e6:.3g} µs overlapped")
    if line.stages > 1:
        text.append(f", {saved:.0%} saved", style="green")
    else:
        text.append("   ")
        text.append(f"{_FILL['load']} load ", style="black on yellow")
        text.append(f"{_FILL['compute']} compute ", style="black on cyan")
    text.append("\n")
    return text


def bank_table(run: Simulation) -> RenderableType:
    """Conflicts of reading a K tile as the kernels might."""
    problem, tile = run.problem, run.tile
    size = problem.itemsize
    table = _table("bank conflicts of a K tile", "access", "plain", "padded", "swizzled")
    for access, words in (("row", "along a row"), ("column", "transposed"), ("matrix", "tensor-core operand")):
        row_bytes = problem.head_dim * size
        if row_bytes % (16 if access == "matrix" else 4):
            continue
        found = [
            tile_conflicts(tile.block_k, problem.head_dim, size, access, layout)
            for layout in layouts(access, row_bytes).values()
        ]
        table.add_row(words, *[f"{c.conflicts:,} ({c.degree}-way)" if c.conflicts else "none" for c in found])
    return Folded(table) if table.row_count else Text("")


def simulation(
    runs: Sequence[Simulation], models: Sequence[Traffic], errors: Sequence[float], spec: DeviceSpec, headline: str
) -> RenderableType:
    """Everything about one run, or several schedules side by side."""
    tile = runs[0].tile
    schedules = ", ".join(run.schedule for run in runs)
    head = f"{headline}\ntile {tile}, {tile.stages} stage{'s' * (tile.stages > 1)} · schedule {schedules}"
    parts: list[RenderableType] = [Panel(head, title="simulation", title_align="left", border_style="cyan")]
    parts.append(counts(runs, models, errors))
    for run in runs:
        if run.walk:
            parts.append(walk(run))
    tiled = [run for run in runs if run.walk]
    if tiled:
        parts += [timelines(tiled[-1], spec), bank_table(tiled[-1])]
    return Group(*parts)


def precision(results: Sequence[Result]) -> RenderableType:
    """Error against tile width, with and without rescaling."""
    parts: list[RenderableType] = []
    for data in dict.fromkeys(result.data for result in results):
        mine = [result for result in results if result.data == data]
        widths = list(dict.fromkeys(result.width for result in mine))
        table = _table(f"relative error, {data} scores", "path", *[str(width) for width in widths])
        first = [next(r for r in mine if r.width == width) for width in widths]
        table.add_row("updates", *[f"{r.updates}" for r in first], style="dim")
        table.add_row("rescalings a row", *[f"{r.rescalings:.1f}" for r in first], style="dim")
        table.add_section()
        for path in dict.fromkeys(result.path for result in mine):
            row = {r.width: r for r in mine if r.path == path}
            table.add_row(path, *[_scientific(row[width].relative) for width in widths])
            table.add_row(
                "  never rescaled", *[_scientific(row[width].relative_without) for width in widths], style="dim"
            )
        parts.append(Folded(table))
    parts.append(
        Text(
            "columns: keys a tile; 'never rescaled' starts from the final maxima, so what it shares is not rescaling's"
        )
    )
    return Group(*parts)


def _scientific(value: float) -> str:
    return f"{value:.1e}" if np.isfinite(value) and value > 0 else "0"
