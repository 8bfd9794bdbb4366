"""`tilewise.plan`: the planner, by its public name."""

from __future__ import annotations

from tilewise.hardware import DeviceSpec
from tilewise.planner import Plan, TilePlan
from tilewise.planner import plan as _plan
from tilewise.problem import Problem


def plan(
    problem: Problem, device: str | DeviceSpec | None = None, *, tile: TilePlan | tuple[int, int] | None = None
) -> Plan:
    """Tile, splits, on-chip bytes, predicted traffic and time of `problem` on `device`, with reasons.

    `device` is a name such as `"h200"`, a DeviceSpec, or None for this machine. A given `tile` is kept and its cost shown.
    """
    return _plan(problem, device, tile=tile)
