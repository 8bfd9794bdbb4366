"""Every schedule by name."""

from __future__ import annotations

import math
from collections.abc import Callable

from tilewise.errors import PlanError
from tilewise.model import backward
from tilewise.model.grid import even
from tilewise.model.schedules import Traffic, decode, forward_compulsory, standard, v1, v2
from tilewise.model.tile import TilePlan
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


def compulsory(problem: Problem, tile: TilePlan) -> Traffic:
    """What the pass of `tile` cannot avoid: each input that is used once, each output once."""
    if tile.pass_ in ("forward", "decode"):
        return forward_compulsory(problem, tile)
    problem = even(problem)
    whole = TilePlan(max(1, problem.seqlen_q), max(1, problem.seqlen_k), pass_=tile.pass_)
    moved = SCHEDULES[tile.pass_](problem, whole)
    if tile.pass_ == "backward_dq":  # one Q tile a head still reads K and V for each query head of a group
        for name in ("K", "V"):
            moved.reads[name] //= problem.group
    if problem.bias is not None:
        moved.reads["bias"] = math.prod(problem.bias) * problem.itemsize
    return moved
