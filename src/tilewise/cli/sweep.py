"""`tilewise bench --sweep tiles`: speed over block sizes, drawn beside the model's prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tilewise.cli.console import console, keeping, progress
from tilewise.display import Bar, Cell, Group, Shown, Table, Text, format_seconds

if TYPE_CHECKING:
    from tilewise.lab.bench.sweep import Job, Sweep, TileResult
    from tilewise.lab.bench.timing import Effort

GRID_LEAST = 2
"""A grid is drawn where both sides have so many sizes."""


def run_sweeps(jobs: Sequence[Job], effort: Effort, workers: int, limit: float | None, quiet: bool) -> dict[str, Any]:
    """Time and show, each sweep as it ends; the record."""
    from tilewise.lab.bench import records
    from tilewise.lab.bench.sweep import sweep_all

    sweeps: list[Sweep] = []

    def keep(sweep: Sweep) -> None:
        sweeps.append(sweep)
        if not quiet:
            console().print(shown_sweep(sweep))

    with keeping(sweeps) as interruption, progress() as update:
        sweep_all(jobs, effort, workers, limit, update, keep)
    document = records.document("sweep", [], sweeps=[one.to_dict() for one in sweeps])
    if left_out := [f"{job.case.name}, {job.pass_}" for job in jobs[len(sweeps) :]]:
        document["left_out"] = left_out
        if not quiet:
            console().print(f"[yellow]left out[/] {interruption}: {'; '.join(left_out)}")
    return {**document, "interrupted": interruption.came, "ok": all(one.right and one.near for one in sweeps)}


def shown_sweep(sweep: Sweep) -> Shown:
    return Group(*_shown(sweep))


def _shown(sweep: Sweep) -> Iterator[Shown]:
    yield Text((f"{sweep.case.name}", "bold"), f"  {sweep.case.words()} · {sweep.backend}, {sweep.pass_}")
    yield _tiles(sweep)
    rows, keys = ({side(one) for one in sweep.tiles} for side in (_rows, _keys))
    if len(rows) >= GRID_LEAST and len(keys) >= GRID_LEAST:
        yield _grid(sweep, sorted(rows), sorted(keys))
    yield verdict(sweep)


def _rows(one: TileResult) -> int:
    return one.tile.block_q


def _keys(one: TileResult) -> int:
    return one.tile.block_k


def _tiles(sweep: Sweep) -> Table:
    """A tile a row, the fastest first; both bars are speeds, in that of the fastest and of the one predicted to be."""
    foreseen = min((one.predicted for one in sweep.tiles if one.predicted is not None), default=0.0)
    rows: list[list[Cell]] = []
    for one in sorted(sweep.tiles, key=lambda one: -_speed(sweep, one)):
        planned = one is sweep.planned
        name: Cell = (f"{one.tile} planned", "bold cyan") if planned else str(one.tile)
        if one.seconds is None:
            why = "; ".join(one.result.reasons) or "wrong: no speed"
            rows.append([name, (why, "red"), format_seconds(one.predicted)])
            continue
        off = "–" if one.predicted is None else f"{one.predicted / one.seconds - 1:+.0%}"
        measured = Bar(_speed(sweep, one), "cyan" if planned else "blue")
        predicted = Bar(foreseen / one.predicted if one.predicted else 0.0, "yellow")
        rows.append([name, format_seconds(one.seconds), format_seconds(one.predicted), off, measured, predicted])
    columns = ("tile", "measured", "predicted", "off", "speed", "predicted speed")
    return Table("", columns, rows, wraps=(1, 4, 5))


def _speed(sweep: Sweep, one: TileResult) -> float:
    """In that of the fastest; 0 for what did not run. What only looked faster the first time counts as as fast."""
    best = sweep.fastest
    return min(1.0, one.speed.p50 / best.speed.p50) if one.speed and best and best.speed else 0.0


def _grid(sweep: Sweep, rows: list[int], keys: list[int]) -> Table:
    """Speed in that of the fastest: queries of a tile down, keys across."""
    tiles = {one.tile.sizes: one for one in sweep.tiles}
    lines: list[list[Cell]] = []
    for m in rows:
        line: list[Cell] = [(str(m), "bold")]
        for n in keys:
            one = tiles.get((m, n))
            if one is None or not _speed(sweep, one):
                line.append(("✗" if one else "·", "dim"))
            else:
                style = "bold cyan" if one is sweep.planned else "green" if one is sweep.fastest else ""
                line.append((f"{_speed(sweep, one):.0%}", style))
        lines.append(line)
    return Table("speed by queries (down) and keys (across) of a tile", ("", *map(str, keys)), lines)


def verdict(sweep: Sweep) -> Text:
    """How far the planner's tile is from the fastest."""
    from tilewise.lab.bench.sweep import NEAR

    best = sweep.fastest
    if best is None or sweep.ratio is None:
        return Text(("the planner's tile did not run", "red"))
    if best is sweep.planned:
        return Text(("the planner's tile is the fastest", "green"), f" of {len(sweep.tiles)}")
    text = f"the planner's {sweep.planned.tile} takes {sweep.ratio - 1:.1%} more than {best.tile}, "
    text += f"the fastest of {len(sweep.tiles)} (limit {NEAR - 1:.0%})"
    return Text((text, "green" if sweep.near else "red"))
