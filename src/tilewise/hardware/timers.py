"""One timer for each kind of device: the wall clock for a CPU, events for a GPU. Imports nothing of tilewise."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

Run = Callable[[], Any]
Clock = Callable[[Run, int], float]


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
