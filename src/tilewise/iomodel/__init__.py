"""On-chip bytes, traffic, FLOPs and time of attention, by arithmetic.

Three counts of bytes are kept apart: `compulsory` (each tensor once), tile bytes (what a schedule moves between L2
and the units: `standard`, `v1`, `v2`, `decode` and the backward passes) and `dram` (what of them L2 lets through).
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise.errors import PlanError
from tilewise.iomodel import backward, seeds
from tilewise.iomodel.flops import Work, visible_pairs, work
from tilewise.iomodel.l2 import dram
from tilewise.iomodel.onchip import OnChip, kernel
from tilewise.iomodel.roofline import Roofline, roofline
from tilewise.iomodel.tile import TilePlan
from tilewise.iomodel.traffic import Traffic, compulsory, decode, standard, v1, v2
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


__all__ = [
    "SCHEDULES",
    "OnChip",
    "Roofline",
    "TilePlan",
    "Traffic",
    "Work",
    "backward",
    "compulsory",
    "decode",
    "dram",
    "kernel",
    "roofline",
    "seeds",
    "standard",
    "traffic",
    "v1",
    "v2",
    "visible_pairs",
    "work",
]
