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

L2_LATENCY_CLOCKS = 250
"""From a GPU's request to the first bytes out of L2: 200 to 300 clocks in microbenchmarks since Ampere (arXiv 2208.11174 for
the A100). A core's prefetchers ask early enough to hide theirs."""


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


def timeline(loads: Sequence[float], computes: Sequence[float], stages: int, latency: float = 0.0) -> Timeline:
    """Tile j goes into buffer j mod `stages`. It is asked for as soon as that buffer is free, its bytes start to arrive
    `latency` later, and one tile's bytes follow another's.

    With equal tiles, loads of t and computes of c: one buffer takes latency + t + c for each of them, `stages` buffers
    max(t, c, (latency + t + c) / stages) in the long run. So two are enough without latency, and latency wants more.
    """
    if stages < 1:
        raise PlanError(f"stages: got {stages}, need at least 1 (2 for double buffering)")
    events: list[Event] = []
    wire = worker = 0.0
    done: list[float] = []
    for step, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        asked = done[step - stages] if step >= stages else 0.0
        start = max(wire, asked + latency)
        wire = start + load
        begin = max(wire, worker)
        worker = begin + compute
        done.append(worker)
        events.append(Event(step % stages, "load", step, start, wire))
        events.append(Event(step % stages, "compute", step, begin, worker))
    return Timeline(stages, tuple(events))


def unit_bandwidth(spec: DeviceSpec) -> float:
    """Bytes a second from L2 to one unit. Blocks of a head pass over its K and V together, so tiles come out of L2; memory
    sends each of them once for all (docs/io-model.md). A core has an L2 of its own."""
    return spec.l2_bandwidth / spec.units if spec.is_gpu else spec.l2_bytes_per_cycle * spec.clock_hz


def block_timeline(problem: Problem, tile: TilePlan, keys: Sequence[int], rows: int, spec: DeviceSpec) -> Timeline:
    """The timeline of one block of `rows` queries over tiles of `keys` keys that has a unit of the device to itself."""
    width = problem.head_dim + problem.head_dim_v
    size = problem.itemsize if spec.is_gpu else max(4, problem.itemsize)  # CPUs widen 16-bit inputs while packing them
    flops = (spec.flops(problem.dtype, problem.precision) or spec.flops("float32")) / spec.units
    exps = spec.exp_rate / spec.units
    loads = [n * width * size / unit_bandwidth(spec) for n in keys]
    computes = [
        tile_flops("forward", rows, n, problem.head_dim, problem.head_dim_v) / flops + rows * n / exps for n in keys
    ]
    return timeline(loads, computes, tile.stages, L2_LATENCY_CLOCKS / spec.clock_hz if spec.is_gpu else 0.0)
