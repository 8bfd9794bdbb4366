"""When tiles are loaded and when they are worked on, with one buffer or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.errors import PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.model.cycles import tile_flops
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem


@dataclass(frozen=True)
class Event:
    """Something a buffer does from `start` to `end`, for the tile at place `step` of the walk."""

    buffer: int
    kind: str
    step: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of one block's walk over its key tiles."""

    stages: int
    events: tuple[Event, ...]

    @property
    def total(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    def busy(self, kind: str) -> float:
        """Time spent on one kind of work."""
        return sum(event.end - event.start for event in self.events if event.kind == kind)

    @property
    def overlap(self) -> float:
        """Time during which something was loaded while something else was computed."""
        covered, end = 0.0, 0.0
        for event in sorted(self.events, key=lambda event: event.start):
            covered += max(0.0, event.end - max(event.start, end))
            end = max(end, event.end)
        return self.busy("load") + self.busy("compute") - covered

    def to_dict(self) -> dict[str, Any]:
        return {
            "stages": self.stages,
            "total": self.total,
            "load": self.busy("load"),
            "compute": self.busy("compute"),
            "overlap": self.overlap,
            "events": [[e.buffer, e.kind, e.step, e.start, e.end] for e in self.events],
        }


def timeline(loads: Sequence[float], computes: Sequence[float], stages: int) -> Timeline:
    """Tile j is loaded into buffer j mod `stages` as soon as the loader is free and the buffer's last tile is done."""
    if stages < 1:
        raise PlanError(f"stages: got {stages}, need at least 1 (2 for double buffering)")
    events: list[Event] = []
    loader = worker = 0.0
    done: list[float] = []
    for step, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        free = done[step - stages] if step >= stages else 0.0
        start = max(loader, free)
        loader = start + load
        begin = max(loader, worker)
        worker = begin + compute
        done.append(worker)
        events.append(Event(step % stages, "load", step, start, loader))
        events.append(Event(step % stages, "compute", step, begin, worker))
    return Timeline(stages, tuple(events))


def block_timeline(problem: Problem, tile: TilePlan, keys: Sequence[int], rows: int, spec: DeviceSpec) -> Timeline:
    """The timeline of one block of `rows` queries over tiles of `keys` keys, on one unit's share of a device."""
    width = problem.head_dim + problem.head_dim_v
    bandwidth = spec.dram_bandwidth / spec.units
    flops = (spec.flops(problem.dtype, problem.precision) or spec.flops("float32")) / spec.units
    exps = spec.exp_rate / spec.units
    loads = [n * width * problem.itemsize / bandwidth for n in keys]
    computes = [
        tile_flops("forward", rows, n, problem.head_dim, problem.head_dim_v) / flops + rows * n / exps for n in keys
    ]
    return timeline(loads, computes, tile.stages)
