"""Who computes what when: the events of a predicted pass, drawn; and schedules beside each other for many numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tilewise.display import Drawing, Group, Line, Shown, Span, Table, Text, format_seconds
from tilewise.distributed.comparison import SCHEDULES, Row
from tilewise.distributed.predict import Prediction
from tilewise.distributed.show import show_comparison

MOST_LANES = 16
"""Ranks that are drawn."""
_STAGE = "█▓"
_WAIT = "·"


class Event(NamedTuple):
    """What a rank does from `start` to `end`: "receive" what a stage needs, "compute" it, or "return" results and gradients."""

    rank: int
    kind: str
    stage: int
    start: float
    end: float


def events(found: Prediction) -> Iterator[Event]:
    """The predicted pass as it unfolds, by rank and stage; events without a length are left out."""
    for rank in range(found.compute.shape[1]):
        computed = link = back = 0.0
        for stage, (compute, arrive, returned) in enumerate(
            zip(found.compute[:, rank], found.arrive[:, rank], found.back[:, rank], strict=True)
        ):
            if not found.overlaps:
                link = computed = back = max(link, computed, back)
            yield from _event(rank, "receive", stage, link, arrive)
            link += arrive
            begin = max(computed, link)
            yield from _event(rank, "compute", stage, begin, compute)
            computed = begin + compute
            if returned > 0:
                begin = max(back, computed)
                yield from _event(rank, "return", stage, begin, returned)
                back = begin + returned


def _event(rank: int, kind: str, stage: int, start: float, seconds: float) -> Iterator[Event]:
    if seconds > 0:
        yield Event(rank, kind, stage, float(start), float(start + seconds))


def show_schedules(title: str, rows: Sequence[Row]) -> Shown:
    """One number of ranks: the table of schedules, then the plan as it unfolds."""
    note = "Bytes of the busiest rank, time of the slowest, forward and backward of one layer; predicted, not measured."
    return Group(Text((title, "bold")), show_comparison(rows), Text((note, "dim")), *_lanes(rows[-1]))


def show_ranks(title: str, table: Mapping[int, Sequence[Row]]) -> Shown:
    """Several numbers of ranks: the time of each schedule, and how many times fewer bytes the plan sends than all-gather."""
    columns = ("ranks", *SCHEDULES, "fewer bytes", "imbalance")
    lines = []
    for ranks, rows in table.items():
        fastest = min((row.seconds for row in rows if row.seconds is not None), default=0.0)
        by_name = {row.name: row for row in rows}
        times: list[Span] = [
            (format_seconds(row.seconds) if row.runs else "–", "bold green" if row.seconds == fastest else "")
            for row in rows
        ]
        planned = by_name["planned"]
        balance = f"{100 * (planned.imbalance or 0.0):.1f} %"
        lines.append([str(ranks), *times, fewer_bytes(by_name["all-gather"], planned), balance])
    note = "Time of the slowest rank, forward and backward of one layer; predicted, not measured. Imbalance is the plan's."
    return Group(Table(title, columns, lines), Text((note, "dim")))


def fewer_bytes(other: Row, planned: Row) -> str:
    """How many times fewer bytes the plan's busiest rank sends in both passes."""
    ours, theirs = (row.bytes_forward + row.bytes_backward for row in (planned, other))  # type: ignore[operator]
    return "none sent" if not ours else f"{theirs / ours:.1f}×" if theirs < 100 * ours else f"{theirs / ours:.0f}×"


def _lanes(planned: Row) -> Iterable[Shown]:
    """The forward pass of the plan, a line for each rank."""
    found = planned.forward
    if found is None or found.compute.shape[1] > MOST_LANES or not found.seconds:
        return
    ranks, whole, seen = found.compute.shape[1], found.seconds, list(events(found))

    def draw(width: int) -> Iterator[Line]:
        cells = max(width - 9, 8)
        for rank in range(ranks):
            line = np.full(cells, _WAIT)
            for event in seen:
                if event.rank == rank and event.kind == "compute":
                    line[int(cells * event.start / whole) : max(int(cells * event.end / whole), 1)] = _STAGE[event.stage % 2]
            yield [(f"rank {rank:>3} ", "dim"), ("".join(line), "blue")]

    yield Text(("The plan's forward: ", "bold"), f"{_STAGE[0]} and {_STAGE[1]} are stages, {_WAIT} is waiting.")
    yield Drawing(draw)
