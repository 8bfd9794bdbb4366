"""A plan of context parallelism, and the comparison with other schedules, as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewise import hardware
from tilewise.display import Cell, Group, Panel, Shown, Table, facts, format_bytes, format_seconds
from tilewise.errors import TilewiseError
from tilewise.model.show import describe_problem

if TYPE_CHECKING:
    from tilewise.distributed.comparison import Row
    from tilewise.distributed.context import ContextPlan

MOST_RANKS = 8
"""Ranks that are shown one by one."""


def show_plan(plan: ContextPlan) -> Shown:
    """Shards, work and bytes of the ranks, and predicted times where the links of the device are known."""
    tokens = plan.shards.tokens
    everything = plan.tokens * (plan.ranks - 1) * plan.row_bytes.kv
    sent = plan.total_bytes()
    less = f", {everything / sent:.3g} times less than an all-gather" if 0 < sent < everything else ""
    rows: list[tuple[str, Cell]] = [
        ("ranks", f"{plan.ranks}, {plan.kind} shards of {tokens.min()} to {tokens.max()} tokens"),
        ("area", f"{plan.imbalance:.1%} more than the mean on the most loaded rank"),
        ("sent", f"forward {format_bytes(sent)} by all ranks{less}; backward {format_bytes(plan.total_bytes(backward=True))}"),
        ("bytes", _least(plan)),
        ("stages", f"own keys, then {len(plan.stages) - 1} with keys or queries of other ranks"),
    ]
    return Panel(f"Context parallel: {describe_problem(plan.problem)}", Group(facts([*rows, *_times(plan)]), _ranks(plan)))


def _least(plan: ContextPlan) -> str:
    """Both passes beside what the shards need at least."""
    least = plan.least_bytes()
    if not least.sent:
        return "nothing travels"
    rows, cut = f"{least.of_rows:.2f} times each row that is needed, once", f"{least.of_cut:.2f} times a minimum cut"
    return f"{rows}, by the cheaper route; {cut}"


def _times(plan: ContextPlan) -> list[tuple[str, Cell]]:
    """Predicted seconds; nothing is said of a device that cannot be predicted."""
    try:
        name = hardware.device(plan.device).name
        passes = [("forward", plan.predict()), ("backward", plan.predict(backward=True))]
    except TilewiseError:
        return []
    words = [
        f"{which} {format_seconds(found.seconds)}, {format_seconds(found.exposed_seconds)} of it exposed communication"
        for which, found in passes
    ]
    return [("predicted", f"{'; '.join(words)}, on {name}")]


def _ranks(plan: ContextPlan) -> Table:
    shown = range(min(plan.ranks, MOST_RANKS))
    mean = max(sum(plan.area(rank) for rank in range(plan.ranks)) / plan.ranks, 1e-9)
    rows: list[Sequence[Cell]] = [
        (
            f"{rank}",
            f"{plan.local_tokens(rank)}",
            f"{len(plan.chunks[rank])}",
            f"{plan.area(rank) / mean:.1%}",
            format_bytes(plan.bytes_sent(rank)),
            format_bytes(plan.bytes_sent(rank, backward=True)),
        )
        for rank in shown
    ]
    if plan.ranks > MOST_RANKS:
        rows.append((f"… {plan.ranks - 1}",))
    return Table("", ("rank", "tokens", "chunks", "area of mean", "sent forward", "sent backward"), rows)


def show_comparison(rows: Sequence[Row]) -> Table:
    """One line for each schedule; the bytes are the busiest rank's, the times the slowest one's."""
    lines: list[Sequence[Cell]] = []
    best = min((row.seconds for row in rows if row.seconds is not None), default=0.0)
    for row in rows:
        if row.seconds is None or row.exposed_seconds is None or row.imbalance is None:
            lines.append((row.name, "", "", "", "", "", row.note))
            continue
        sent = [format_bytes(size or 0) for size in (row.bytes_forward, row.bytes_backward)]
        times = [format_seconds(row.seconds), format_seconds(row.exposed_seconds)]
        style = "green" if row.seconds == best else ""
        lines.append(((row.name, style), *sent, f"{row.imbalance:.1%}", *times, row.note))
    columns = ("schedule", "sent forward", "sent backward", "imbalance", "forward + backward", "exposed", "")
    return Table("", columns, lines, wraps=(6,))
