"""A simulation as a person reads it: counts, the tile walk, the timeline, bank conflicts, the precision experiment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tilewise.display import Cell, Drawing, Group, Line, Panel, Shown, Table, Text, styled
from tilewise.hardware.spec import DeviceSpec
from tilewise.lab.simulator.banks import layouts, tile_conflicts
from tilewise.lab.simulator.device import Simulation
from tilewise.lab.simulator.precision import Result
from tilewise.lab.simulator.timeline import Timeline, block_timeline
from tilewise.masks import TileMap
from tilewise.model.schedules import Traffic

_WALK_ROWS, _WALK_WIDTH, _LINE_WIDTH = 40, 110, 78
"""Rows of tiles, and characters of a walk and of a timeline, drawn at most."""
_FILL = {"load": "░", "compute": "▓"}
_STYLE = {"load": "black on yellow", "compute": "black on cyan"}
_TILE_STYLES = ("dim", "black on yellow", "black on cyan")
_ACCESSES = {"row": "along a row", "column": "transposed", "matrix": "tensor-core operand"}


def counts(runs: Sequence[Simulation], models: Sequence[Traffic], errors: Sequence[float]) -> Shown:
    """Bytes by tensor and direction of one or more schedules side by side, and what else they did."""
    names = dict.fromkeys(name for run in runs for name, _, _ in run.traffic.tensors())
    columns = [f"{run.label} {what}" for run in runs for what in ("reads", "writes")]
    rows: list[Sequence[Cell] | None] = [
        [name, *(f"{n:,}" if n else "·" for run in runs for n in (run.traffic.reads[name], run.traffic.writes[name]))]
        for name in names
    ]
    totals = [f"{n:,}" for run in runs for n in (run.traffic.total_read, run.traffic.total_written)]
    rows += [None, styled("bold", "all", *totals)]
    agree = [run.traffic == model for run, model in zip(runs, models, strict=True)]
    done: list[Sequence[Cell]] = [
        styled("bold", "bytes moved", *(f"{run.traffic.total:,}" for run in runs)),
        ["IO model says", *(("the same", "green") if same else ("other", "bold red") for same in agree)],
        ["largest error", *(f"{error:.1e}" for error in errors)],
        ["softmax updates", *(f"{run.counts.updates:,}" for run in runs)],
        ["of them rescaling", *(f"{run.counts.rescales:,}" for run in runs)],
        ["exponentials", *(f"{run.counts.exps:,}" for run in runs)],
        ["matrix FLOPs", *(f"{run.counts.flops:,}" for run in runs)],
        ["FLOPs a byte", *(f"{run.counts.flops / max(1, run.traffic.total):.2f}" for run in runs)],
        ["on chip, at most", *(f"{run.sram_peak:,}" if run.sram_peak else "streamed" for run in runs)],
    ]
    return Group(
        Table("bytes by tensor", ("tensor", *columns), rows),
        Table("what it did", ("", *(run.label for run in runs)), done),
    )


def walk(run: Simulation) -> Shown:
    """The tiles of the first head, each with its place in the order they were visited; as many as there is room for."""
    return Drawing(lambda width: _walk(run, min(width, _WALK_WIDTH)))


def _walk(run: Simulation, room: int) -> Iterator[Line]:
    problem, tile = run.problem, run.tile
    tiles = TileMap(problem.program, problem.shape, tile.block_q, tile.block_k)
    order: dict[tuple[int, int], int] = {}
    for visit in run.walk:
        if (visit.b, visit.h) == (0, 0):
            order.setdefault((visit.i, visit.j), len(order) + 1)
    width = max(2, len(str(len(order)))) + 2
    rows, cols = min(tiles.rows, _WALK_ROWS), min(tiles.cols, max(1, (room - len(_row_name(0))) // (width + 1)))
    whole = (rows, cols) == (tiles.rows, tiles.cols)
    note = "" if whole else f" (first {rows}×{cols} of {tiles.rows}×{tiles.cols})"
    yield [(f"tile walk of {run.label}, keys to the right{note}", "bold")]
    for i in range(rows):
        line: Line = [(_row_name(i), "dim")]
        classes = tiles.row(i, 0, 0)
        for j in range(cols):
            number = order.get((i, j))
            label = "· " if number is None else f"{number}{'~' if classes[j] == 1 else ' '}"
            line += [(label.rjust(width), _TILE_STYLES[classes[j]]), (" ", "")]
        yield line
    empty, partial_, full = _TILE_STYLES
    yield [("  ", ""), (" 1 full ", full), (" ", ""), (" 1~ partial ", partial_), ("  · empty, never read", empty)]


def _row_name(i: int) -> str:
    return f"  Q{i:<3}"


def timelines(run: Simulation, spec: DeviceSpec) -> Shown:
    """The fullest query block's walk with one buffer and with two."""
    problem, tile = run.problem, run.tile
    tiles = TileMap(problem.program, problem.shape, tile.block_q, tile.block_k)
    fullest = max(range(tiles.rows), key=lambda i: len(tiles.key_blocks(i, 0, 0)), default=0)
    keys = [min(tile.block_k, problem.seqlen_k - j * tile.block_k) for j, _ in tiles.key_blocks(fullest, 0, 0)]
    rows = min(tile.block_q, problem.seqlen_q - fullest * tile.block_q)
    single, double = (
        block_timeline(problem, replace(tile, stages=stages), keys, rows, spec) for stages in (1, max(2, tile.stages))
    )
    title = Text((f"timeline of Q{fullest} on one unit of {spec.name}", "bold"))
    return Group(title, *(Drawing(partial(_draw, line, single.total)) for line in (single, double)))


def _draw(timeline: Timeline, full: float, room: int) -> Iterator[Line]:
    """One row a buffer; loads light, computation dark, each with its tile's number where there is room."""
    name = "  buffer {} "
    width = max(1, min(_LINE_WIDTH, room - len(name)))
    scale = width / full if full else 0.0
    for buffer in range(timeline.stages):
        cells: Line = [(" ", "")] * (width + 1)
        for event in timeline.events:
            if event.buffer != buffer:
                continue
            first, last = round(event.start * scale), max(round(event.start * scale) + 1, round(event.end * scale))
            fill = _FILL[event.kind]
            label = f"{event.step}".center(last - first, fill) if last - first > 2 else fill * (last - first)
            for offset, ch in enumerate(label):
                if first + offset <= width:
                    cells[first + offset] = (ch, _STYLE[event.kind])
        yield [(name.format(chr(65 + buffer)), "dim"), *cells]
    how = "one buffer" if timeline.stages == 1 else f"{timeline.stages} buffers"
    line: Line = [(f"  {how}: {timeline.total * 1e6:.3g} µs, {timeline.overlap * 1e6:.3g} µs overlapped", "")]
    if timeline.stages > 1:
        saved = 1 - timeline.total / full if full else 0.0
        yield [*line, (f", {saved:.0%} saved", "green")]
    else:
        yield [*line, ("   ", ""), *((f"{_FILL[kind]} {kind} ", _STYLE[kind]) for kind in _FILL)]


def bank_table(run: Simulation) -> Table:
    """Conflicts of reading a K tile as the kernels might."""
    problem, tile = run.problem, run.tile
    row_bytes, rows = problem.head_dim * problem.itemsize, []
    for access, name in _ACCESSES.items():
        if row_bytes % (16 if access == "matrix" else 4):
            continue
        conflicts = [
            tile_conflicts(tile.block_k, problem.head_dim, problem.itemsize, access, layout)
            for layout in layouts(access, row_bytes).values()
        ]
        rows.append([name, *(f"{c.conflicts:,} ({c.degree}-way)" if c.conflicts else "none" for c in conflicts)])
    return Table("bank conflicts of a K tile", ("access", "plain", "padded", "swizzled"), rows)


def simulation(
    runs: Sequence[Simulation], models: Sequence[Traffic], errors: Sequence[float], spec: DeviceSpec, headline: str
) -> Shown:
    """Everything about one run, or several schedules side by side."""
    tile, tiled = runs[0].tile, [run for run in runs if run.walk]
    schedules = ", ".join(run.label for run in runs)
    head = f"{headline}\ntile {tile}, {tile.stages} stage{'s' * (tile.stages > 1)} · schedule {schedules}"
    parts = [Panel("simulation", Text(head)), counts(runs, models, errors), *map(walk, tiled)]
    if tiled:
        banks = bank_table(tiled[-1])
        parts += [timelines(tiled[-1], spec), *([banks] if banks.rows else [])]
    return Group(*parts)


def precision(results: Sequence[Result]) -> Shown:
    """Error against tile width, with and without rescaling."""
    tables = []
    for data in dict.fromkeys(result.data for result in results):
        mine = [result for result in results if result.data == data]
        widths = list(dict.fromkeys(result.width for result in mine))
        first = [next(r for r in mine if r.width == width) for width in widths]
        rows: list[Sequence[Cell] | None] = [
            styled("dim", "updates", *(f"{r.updates}" for r in first)),
            styled("dim", "rescalings a row", *(f"{r.rescalings:.1f}" for r in first)),
            None,
        ]
        for path in dict.fromkeys(result.path for result in mine):
            row = {r.width: r for r in mine if r.path == path}
            rows.append([path, *(_scientific(row[width].relative) for width in widths)])
            rows.append(styled("dim", "  never rescaled", *(_scientific(row[width].relative_without) for width in widths)))
        tables.append(Table(f"relative error, {data} scores", ("path", *map(str, widths)), rows))
    note = "columns: keys a tile; 'never rescaled' starts from the final maxima, so what it shares is not rescaling's"
    return Group(*tables, Text(note))


def _scientific(value: float) -> str:
    return f"{value:.1e}" if np.isfinite(value) and value > 0 else "0"
