"""One timer for each kind of device: the wall clock for a CPU, events for a GPU. Imports nothing of tilewise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

Run = Callable[[], Any]
Clock = Callable[[Run, int], float]
SAMPLE = 2e-3
"""Seconds that a sample lasts at least: shorter ones measure the clock."""


def wall_clock(run: Run, number: int) -> float:
    """Seconds of one call, averaged over `number` of them."""
    start = time.perf_counter()
    for _ in range(number):
        run()
    return (time.perf_counter() - start) / number


def cuda_clock(run: Run, number: int) -> float:
    """Seconds of one call on the GPU, between two events; launching counts only where the GPU waits for it."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(number):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / number


def clock_for(device: str) -> Clock:
    return cuda_clock if device.startswith("cuda") else wall_clock


def median_seconds(run: Run, device: str, rounds: int, limit: float = float("inf")) -> tuple[float, int]:
    """The median time of up to `rounds` calls, and their number; after `limit` seconds no further one starts."""
    clock = clock_for(device)
    for _ in range(3 if device.startswith("cuda") else 1):
        clock(run, 1)  # warm up
    samples: list[float] = []
    while len(samples) < rounds and sum(samples) < limit:
        samples.append(clock(run, 1))
    return median(samples), len(samples)


def steady_seconds(run: Run, device: str, rounds: int, limit: float, tries: int) -> tuple[float, float]:
    """The median time of a call and its spread, (p80 − p20) / median.

    A spread above `limit` is measured again, up to `tries` times; the steadiest counts. A sample repeats the call until it is at
    least SAMPLE long.
    """
    clock = clock_for(device)
    clock(run, 1)  # warm up
    number = max(1, math.ceil(SAMPLE / max(clock(run, 1), 1e-9)))
    best = (0.0, math.inf)
    for _ in range(tries):
        samples = [clock(run, number) for _ in range(rounds)]
        middle, fifths = median(samples), quantiles(samples, n=5, method="inclusive")
        best = min(best, (middle, (fifths[-1] - fifths[0]) / middle), key=lambda found: found[1])
        if best[1] <= limit:
            break
    return best
