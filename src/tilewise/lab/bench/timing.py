"""Interleaved timing. Contenders take turns, so that a busy moment of the machine falls on all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

Timer = Callable[[int], float]
"""Seconds of one call, averaged over that many calls."""
Progress = Callable[[str, float], None]
"""Hears what is being done, and how much of everything is done, from 0 to 1."""
MOST_CALLS = 10_000
GPU_SAMPLE = 20e-3
"""A GPU's samples last longer: before the first launch it waits for the host."""


class Spread(NamedTuple):
    """Twentieth, fiftieth and eightieth percentile of a sample."""

    p20: float
    p50: float
    p80: float
    samples: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        p20, p50, p80 = (float(p) for p in np.percentile(values, [20, 50, 80]))
        return cls(p20, p50, p80, len(values))


def silent(what: str, done: float) -> None:
    """Progress that nobody hears."""


class Effort(NamedTuple):
    """How long to measure: until `seconds` are spent, within the limits on rounds."""

    seconds: float = 3.0
    least: int = 5
    most: int = 200
    sample: float = 2e-3  # a sample repeats its call until it is at least this long

    def on(self, device: str) -> Effort:
        return self._replace(sample=max(self.sample, GPU_SAMPLE)) if device.startswith("cuda") else self


def interleave(
    timers: Mapping[str, Timer], effort: Effort, on_round: Callable[[float], None] | None = None
) -> dict[str, list[float]]:
    """Samples in seconds by name, one for each round; every round has another order.

    `on_round` hears the share of the work done, from 0 to 1.
    """
    numbers = {name: _calls(timer, effort.sample) for name, timer in timers.items()}
    samples: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    begin = time.perf_counter()
    for rounds in range(effort.most):
        spent = time.perf_counter() - begin
        if rounds >= effort.least and spent >= effort.seconds:
            break
        if on_round:
            on_round(min(1.0, max(spent / max(effort.seconds, 1e-9), rounds / effort.most)))
        turn = rounds % len(names)
        order = names[turn:] + names[:turn]
        backwards = rounds // len(names) % 2  # nobody always follows the same one
        for name in reversed(order) if backwards else order:
            samples[name].append(timers[name](numbers[name]))
    if on_round:
        on_round(1.0)
    return samples


def _calls(timer: Timer, sample: float) -> int:
    """How many calls last as long as a sample. One alone looks longer than it is, by the time it takes to begin."""
    timer(1)  # warm caches, threads and compilers
    number = 1
    while number < MOST_CALLS and (seconds := timer(number)) * number < sample:
        number = min(MOST_CALLS, max(number + 1, math.ceil(sample / max(seconds, 1e-7))))
    return number


def ratio(slow: list[float], fast: list[float]) -> Spread:
    """How many times faster the second is, round by round: what disturbs a round disturbs both sides."""
    return Spread.of([a / b for a, b in zip(slow, fast, strict=True)])
