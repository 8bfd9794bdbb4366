"""`tilewise.distributed.measure_links`: how fast the ranks of a group really exchange tensors and compute, for predictions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tilewise import hardware
from tilewise.api.attention import attention
from tilewise.distributed.agree import place_of
from tilewise.distributed.exchange import Link
from tilewise.distributed.predict import pair_seconds, reference_call
from tilewise.errors import PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.problem import Problem

SIZES = (64 << 10, 16 << 20)
"""Bytes that each rank sends: few, for the latency, and as many as a stage has."""
FIRST, ROUNDS = 2, 5
"""Rounds that connect, compile and wake cores, and those that count."""
LONGEST = 2048
"""Tokens of the call that is timed."""


def measure_links(
    group: Any = None, device: str | DeviceSpec | None = None, problem: Problem | None = None
) -> DeviceSpec:
    """The device with the rate and the latency of its links as the ranks of a group have them now. Every rank calls it.

    All ranks exchange messages with all others at once, as in a stage of a plan: links that share a bus, or processes that
    share the cores which copy, are slower so than two of them alone. All ranks get the same figures, those of the slowest.
    Takes about a tenth of a second, with a problem as long as some calls of it.

    group: a process group; None for torch's default group.
    device: what the other figures are of, such as "h200"; None for this machine.
    problem: what will be planned. All ranks compute a part of it at once, forward and backward, and the device gets the clock at
        which the IO model takes as long. Cores differ in clocks that the system does not tell, and slow each other down.

    >>> device = tw.distributed.measure_links(group, problem=problem)
    >>> plan = tw.distributed.plan(problem, group, device=device)
    >>> plan.predict().seconds
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError("group: torch.distributed has no process group; call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    spec, ranks = hardware.device(device), dist.get_world_size(group)
    if ranks == 1:
        return spec if problem is None else _with_clock(spec, group, problem, ranks)
    small, large = (_seconds(group, ranks, size) for size in SIZES)
    per_byte = max(large - small, 1e-12) / (SIZES[1] - SIZES[0])
    latency = max(small - SIZES[0] * per_byte, 0.0)
    source = f"measured: {ranks} ranks of {dist.get_backend(group)}, all at once, {SIZES[1] >> 20} MiB from each"
    spec = spec.with_figures(source, link_bandwidth=1 / per_byte, link_latency_s=latency)
    return spec if problem is None else _with_clock(spec, group, problem, ranks)


def _with_clock(spec: DeviceSpec, group: Any, problem: Problem, ranks: int) -> DeviceSpec:
    """The device with the clock at which a call that stands for a rank's part takes what it takes on all ranks at once."""
    plain: dict[str, Any] = {"dropout_p": 0.0, "sinks": False, "alibi": False, "stats": (), "origins": False}
    tokens = min(problem.seqlen_q // ranks, LONGEST)
    call = reference_call(replace(problem, **plain), spec, tokens)
    predicted = sum(seconds * call.seqlen_q * call.seqlen_k for seconds, _ in pair_seconds(call, spec, call.seqlen_q))
    measured = _call_seconds(group, call)
    faster = predicted / measured
    rates = {name: getattr(spec, name) * faster for name in ("clock_hz", "exp_rate", "l2_bandwidth")}
    peak = {dtype: rate * faster for dtype, rate in spec.peak.items()}
    source = f"measured: {ranks} ranks at once, {call.seqlen_q} tokens, {1e3 * measured:.1f} ms forward and backward"
    return spec.with_figures(source, **{name: rate for name, rate in rates.items() if rate}, peak=peak)


def _call_seconds(group: Any, call: Problem) -> float:
    """A forward and a backward on all ranks at once: the slowest rank's median."""
    place, dtype = place_of(group), getattr(torch, call.dtype)
    shapes = ((call.heads, call.head_dim), (call.kv_heads, call.head_dim), (call.kv_heads, call.head_dim_v))
    inputs = [torch.randn((1, n, call.seqlen_q, d), device=place, dtype=dtype, requires_grad=True) for n, d in shapes]
    options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "precision": call.precision}

    def run() -> None:
        out = attention(*inputs, **options)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return _slowest(group, place, run, together=False)


def _seconds(group: Any, ranks: int, size: int) -> float:
    """Until every rank has sent so many bytes to the others together, and received as many."""
    place, rank = place_of(group), dist.get_rank(group)
    link, others = Link(group, rank), [other for other in range(ranks) if other != rank]
    half = torch.zeros(size // (8 * len(others)), device=place)  # k and v: a message is packed from both
    incoming = {other: [tuple(half.shape)] * 2 for other in others}

    def exchange() -> None:
        link.start("links", {other: [half, half] for other in others}, incoming, half.dtype, place).wait()

    return _slowest(group, place, exchange)


def _slowest(group: Any, place: torch.device, run: Callable[[], None], together: bool = True) -> float:
    """Seconds of the slowest rank: the median of what all ranks together take, or (not `together`) of what each takes, since a
    call that waits for no other is now and then late on one of them."""
    times = []
    for _ in range(FIRST + ROUNDS):
        dist.barrier(group)
        start = time.perf_counter()
        run()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        times.append(time.perf_counter() - start)
    own = times[FIRST:]
    slowest = torch.tensor(own if together else [median(own)], dtype=torch.float64, device=place)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(median(slowest.tolist()))
