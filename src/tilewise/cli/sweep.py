"""`tilewise bench --sweep tiles`: speed over block sizes, drawn beside the model's prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tilewise.cli.console import console, progress
from tilewise.display import Bar, Cell, Group, Shown, Table, Text, format_seconds

if TYPE_CHECKING:
    from tilewise.lab.bench.cases import Case
    from tilewise.lab.bench.sweep import Sweep, TileResult

GRID_LEAST = 2
"""A grid is drawn where both sides have so many sizes."""


def run_sweeps(cases: Sequence[Case], backend: str, pass_: str, seconds: float, quiet: bool) -> dict[str, Any]:
    """Time and show; the record."""
    from tilewise.lab.bench import records
    from tilewise.lab.bench.sweep import sweep_all
    from tilewise.lab.bench.timing import Effort

    with progress() as update:
        sweeps = sweep_all(cases, backend, pass_, Effort(seconds=seconds), update)
    if not quiet:
        console().print(shown_sweeps(sweeps))
    document = records.document("sweep", [], sweeps=[one.to_dict() for one in sweeps])
    return {**document, "ok": all(one.right and one.near for one in sweeps)}


def shown_sweeps(sweeps: Sequence[Sweep]) -> Shown:
    return Group(*(block for sweep in sweeps for block in _shown(sweep)))


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
    best = sweep.fastest
    quickest = (best.seconds if best else None) or 0.0
    foreseen = min((one.predicted for one in sweep.tiles if one.predicted is not None), default=0.0)
    rows: list[list[Cell]] = []
    for one in sorted(sweep.tiles, key=lambda one: one.seconds or float("inf")):
        planned = one is sweep.planned
        name: Cell = (f"{one.tile} planned", "bold cyan") if planned else str(one.tile)
        if one.seconds is None:
            why = "; ".join(one.result.reasons) or "wrong: no speed"
            rows.append([name, (why, "red"), format_seconds(one.predicted)])
            continue
        off, promised = (
            ("–", 0.0)
            if one.predicted is None
            else (f"{one.predicted / one.seconds - 1:+.0%}", foreseen / one.predicted)
        )
        bars: list[Cell] = [Bar(quickest / one.seconds, "cyan" if planned else "blue"), Bar(promised, "yellow")]
        rows.append([name, format_seconds(one.seconds), format_seconds(one.predicted), off, *bars])
    columns = ("tile", "measured", "predicted", "off", "speed", "predicted speed")
    return Table("", columns, rows, wraps=(1, 4, 5))


def _grid(sweep: Sweep, rows: list[int], keys: list[int]) -> Table:
    """Speed in that of the fastest: queries of a tile down, keys across."""
    best = sweep.fastest
    quickest = (best.seconds if best else None) or 0.0
    seconds = {(_rows(one), _keys(one)): one.seconds for one in sweep.tiles}
    planned = (_rows(sweep.planned), _keys(sweep.planned))
    lines: list[list[Cell]] = []
    for m in rows:
        line: list[Cell] = [(str(m), "bold")]
        for n in keys:
            taken = seconds.get((m, n))
            text = f"{quickest / taken:.0%}" if taken else "✗" if (m, n) in seconds else "·"
            style = "bold cyan" if (m, n) == planned else "green" if taken == quickest else "" if taken else "dim"
            line.append((text, style))
        lines.append(line)
    return Table("speed by queries (down) and keys (across) of a tile", ("", *map(str, keys)), lines)


def verdict(sweep: Sweep) -> Text:
    """How far the planner's tile is from the fastest."""
    from tilewise.lab.bench.sweep import NEAR

    best, limit = sweep.fastest, f"limit {NEAR - 1:.0%}"
    if best is None or sweep.ratio is None:
        return Text(("the planner's tile did not run", "red"))
    more = sweep.ratio.p50 - 1
    if best is sweep.planned:
        return Text(("the planner's tile is the fastest", "green"), f" of {len(sweep.tiles)}")
    text = (
        f"the planner's {sweep.planned.tile} takes {more:.1%} more than {best.tile}, the fastest of {len(sweep.tiles)}"
    )
    text += f" ({limit})"
    return Text((text, "green" if sweep.near else "red"))
