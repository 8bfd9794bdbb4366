"""`tilewise.distributed.measure_links`: how fast the ranks of a group really exchange tensors, for predictions."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tilewise import hardware
from tilewise.distributed.agree import place_of
from tilewise.distributed.exchange import Link
from tilewise.errors import PlanError
from tilewise.hardware.spec import DeviceSpec

SIZES = (64 << 10, 16 << 20)
"""Bytes that each rank sends: few, for the latency, and as many as a stage has."""
ROUNDS = 5


def measure_links(group: Any = None, device: str | DeviceSpec | None = None) -> DeviceSpec:
    """The device with the rate and the latency of its links as the ranks of a group have them now. Every rank calls it.

    All ranks exchange messages with all others at once, as in a stage of a plan: links that share a bus, or processes that
    share the cores which copy, are slower so than two of them alone. All ranks get the same figures, those of the slowest.
    Takes about a tenth of a second.

    group: a process group; None for torch's default group.
    device: what the other figures are of, such as "h200"; None for this machine.

    >>> device = tw.distributed.measure_links(group)
    >>> plan = tw.distributed.plan(problem, group, device=device)
    >>> plan.predict().seconds
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError("group: torch.distributed has no process group; call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    spec, ranks = hardware.device(device), dist.get_world_size(group)
    if ranks == 1:
        return spec
    small, large = (_seconds(group, ranks, size) for size in SIZES)
    per_byte = max(large - small, 1e-12) / (SIZES[1] - SIZES[0])
    latency = max(small - SIZES[0] * per_byte, 0.0)
    source = f"measured: {ranks} ranks of {dist.get_backend(group)}, all at once, {SIZES[1] >> 20} MiB from each"
    return spec.with_figures(source, link_bandwidth=1 / per_byte, link_latency_s=latency)


def _seconds(group: Any, ranks: int, size: int) -> float:
    """Until every rank has sent so many bytes to the others together, and received as many."""
    place, rank = place_of(group), dist.get_rank(group)
    link, others = Link(group, rank), [other for other in range(ranks) if other != rank]
    half = torch.zeros(size // (8 * len(others)), device=place)  # k and v: a message is packed from both
    times = []
    for _ in range(ROUNDS + 1):
        dist.barrier(group)
        start = time.perf_counter()
        incoming = {other: [tuple(half.shape)] * 2 for other in others}
        link.start("links", {other: [half, half] for other in others}, incoming, half.dtype, place).wait()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=place)  # the first one connects
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(median(slowest.tolist()))
