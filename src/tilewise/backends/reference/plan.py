"""Standard attention has no tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.verdict import Verdict, no_tiles
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.hardware.spec import DeviceSpec
    from tilewise.model.tile import TilePlan


def supports(problem: Problem, spec: DeviceSpec | None = None, *, backward: bool = False) -> Verdict:
    return Verdict.of(
        "standard softmax of float64 has no compensated form; use backend='tiled'" if problem.carries_errors else None,
        no_tiles("reference", problem.tile, "it computes all scores at once"),
    )


def declines(problem: Problem, spec: DeviceSpec | None = None, *, backward: bool = False) -> str | None:
    return "builds the N × N score matrix, so it is used on explicit request only"


def derives(problem: Problem, spec: DeviceSpec | None = None, *, derivative: str) -> Verdict:
    return supports(problem, spec)


def tiles(problem: Problem, spec: DeviceSpec | None = None) -> dict[str, TilePlan]:
    return {}


def choices(problem: Problem, spec: DeviceSpec | None, pass_: str) -> list[TilePlan]:
    return []
