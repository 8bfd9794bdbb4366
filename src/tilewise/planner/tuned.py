"""Tiles that measurement preferred to the model: the one place for exceptions.

An entry applies where every condition matches. It must name the device, the day, the measured number and what it was
measured against, so that it can be measured again and struck out when the model or the kernel improves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise.hardware.spec import DeviceSpec
from tilewise.iomodel.tile import TilePlan
from tilewise.problem import Problem


@dataclass(frozen=True)
class Tuned:
    """A measured exception for one architecture, pass, head dim and dtype size."""

    arch: str
    pass_: str
    head_dim: int
    itemsize: int
    masked: bool | None
    """True only with a mask, False only without one, None for both."""
    tile: TilePlan
    device: str
    date: str
    measured: str
    """The number, with its unit, and the number of the tile the model would have chosen."""
    evidence: str
    """How to measure it again."""


TUNED: tuple[Tuned, ...] = ()


def lookup_tuned(problem: Problem, spec: DeviceSpec, pass_: str) -> Tuned | None:
    """The entry that applies, if any."""
    if not TUNED:
        return None
    masked = bool(problem.program.structure)
    for entry in TUNED:
        if (
            entry.arch == spec.arch
            and entry.pass_ == pass_
            and entry.head_dim == max(problem.head_dim, problem.head_dim_v)
            and entry.itemsize == problem.itemsize
            and entry.masked in (None, masked)
        ):
            return replace(entry, tile=replace(entry.tile, source="tuned", pass_=pass_))
    return None
