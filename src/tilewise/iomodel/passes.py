"""Every schedule by name."""

from __future__ import annotations

from collections.abc import Callable

from tilewise.errors import PlanError
from tilewise.iomodel import backward
from tilewise.iomodel.schedules import Traffic, decode, standard, v1, v2
from tilewise.iomodel.tile import TilePlan
from tilewise.problem import Problem

SCHEDULES: dict[str, Callable[[Problem, TilePlan], Traffic]] = {
    "standard": standard,
    "v1": v1,
    "v2": v2,
    "decode": decode,
    "backward": backward.separate,
    "backward_fused": backward.fused,
    "backward_dkdv": backward.dkdv,
    "backward_dq": backward.dq,
}


def traffic(problem: Problem, tile: TilePlan, schedule: str = "v2") -> Traffic:
    """Tile bytes of a schedule, by tensor and direction."""
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule: got {schedule!r}, need one of {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule](problem, tile)
