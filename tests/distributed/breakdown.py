"""Where the time of context parallelism goes on this machine: kernels alone and together, messages alone, and a call of both.

    python -m tests.distributed.breakdown --ranks 2 --length 8192
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import tilewise as tw
from tests.distributed.timing import leaves, run
from tilewise.distributed import call, exchange, totals
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.exchange import Link
from tilewise.distributed.links import measure_links
from tilewise.distributed.segments import Call
from tilewise.hardware.host import parse_cpu_list
from tilewise.hardware.probe import probe_cpu

Table = dict[str, float]
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("kernels", Call, "forward"),
    ("kernels", Call, "backward"),
    ("agree", call, "same"),
    ("pack, send", Link, "start"),
    ("wait", exchange.Pending, "wait"),
    ("merge", totals.Merged, "add"),
    ("add", totals.Totals, "add"),
)
"""What is timed inside a call: the name of the part, and the function."""
SIZES = (1 << 16, 1 << 20, 1 << 22, 1 << 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("length", 8192), ("heads", 8), ("kv-heads", 8), ("calls", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, this process may use {sorted(os.sched_getaffinity(0))}")
    print(f"hyperthreads of a core: {sorted({tuple(sorted(siblings(cpu))) for cpu in os.sched_getaffinity(0)})}")
    tables: list[Any] = run(options.ranks, parts, options)
    print(f"{'ms':46} {'fastest rank':>14} {'slowest':>10}")
    for name in tables[0]:
        times = [1e3 * table[name] for table in tables]
        print(f"{name:46} {min(times):14.2f} {max(times):10.2f}")


def parts(rank: int, options: argparse.Namespace) -> Table:
    """Seconds of everything, on this rank."""
    tensors, problem = leaves((options.heads, options.kv_heads, options.length))
    device = measure_links(dist.group.WORLD, probe_cpu(1), problem)
    plan = tw.distributed.plan(problem, dist.group.WORLD, device=device)
    inputs = [plan.shard(x, 2).requires_grad_() for x in tensors]
    rate = f"link, 1 GB ({device.link_bandwidth / 1e9:.3f} GB/s)"
    found = {rate: 1e9 / device.link_bandwidth, "link, latency": device.link_latency_s}
    found |= messages(rank, options.ranks)
    found |= _memory()
    forward, backward = _passes(plan, inputs)
    with _stubbed():
        for name, one in (("forward", forward), ("backward", backward)):
            found[f"{name}, all but kernels"] = _timed(one, options.calls)
    for name, one in (("forward", forward), ("backward", backward)):
        with _watched() as spent:
            whole = _timed(one, options.calls)
        found[f"{name}, call"] = whole
        found |= {f"{name}, {part}": seconds / (options.calls + 1) for part, seconds in spent.items()}
        found |= _predicted(plan, name)
    found |= _kernels(rank, options.ranks, {"forward": forward, "backward": backward})
    return found


def _passes(plan: ContextPlan, inputs: list[Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    held: list[Tensor] = []

    def forward() -> None:
        held[:] = [tw.distributed.attention(*inputs, plan)]

    def backward() -> None:
        torch.autograd.grad(held[0], inputs, held[0].detach(), retain_graph=True)

    return forward, backward


def _timed(one: Callable[[], Any], calls: int) -> float:
    times = []
    for _ in range(calls + 1):
        dist.barrier()
        start = time.perf_counter()
        one()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _predicted(plan: ContextPlan, name: str) -> Table:
    guess = plan.predict(backward=name == "backward")
    rank = int(guess.ends.argmax())
    return {
        f"{name}, predicted call": guess.seconds,
        f"{name}, predicted kernels": guess.compute_seconds,
        f"{name}, predicted messages": float((guess.arrive + guess.back)[:, rank].sum()),
    }


@contextmanager
def _watched() -> Iterator[Table]:
    """The parts of what runs meanwhile."""
    spent: Table = {}
    with ExitStack() as stack:
        for name, home, attribute in PARTS:
            stack.enter_context(mock.patch.object(home, attribute, _timer(getattr(home, attribute), name, spent)))
        yield spent


def _timer(function: Callable[..., Any], name: str, spent: Table) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

    return timed


@contextmanager
def _stubbed() -> Iterator[None]:
    """Kernels that compute nothing: their results are those of the first call."""
    with ExitStack() as stack:
        for name in ("forward", "backward"):
            stack.enter_context(mock.patch.object(Call, name, _once(getattr(Call, name))))
        yield


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[int, Any] = {}

    def known(self: Call, segment: Any, *args: Any) -> Any:
        if id(segment) not in kept:
            kept[id(segment)] = function(self, segment, *args)
        return kept[id(segment)]

    return known


def _kernels(rank: int, ranks: int, passes: dict[str, Callable[[], Any]]) -> Table:
    """The kernels of each pass: on this rank while others stand, on all at once, and so with each rank on a core of its own."""
    seconds: Table = {}
    free = os.sched_getaffinity(0)
    for name, one in passes.items():
        jobs: list[tuple[Any, ...]] = []
        kernel = getattr(Call, name)
        with mock.patch.object(Call, name, _kept(kernel, jobs)):
            one()

        def all_jobs(kernel: Callable[..., Any] = kernel, jobs: list[tuple[Any, ...]] = jobs) -> None:
            for job in jobs:
                kernel(*job)

        for turn in range(ranks):
            dist.barrier()
            if turn == rank:
                start = time.perf_counter()
                all_jobs()
                seconds[f"{name}, kernels of this rank alone"] = time.perf_counter() - start
        seconds[f"{name}, kernels of all ranks at once"] = _timed(all_jobs, 3)
        cores = sorted({min(siblings(cpu)) for cpu in free})
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        seconds[f"{name}, at once, a core for each of them"] = _timed(all_jobs, 3)
        os.sched_setaffinity(0, free)
    return seconds


def siblings(cpu: int) -> set[int]:
    """The hyperthreads of a core."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return {cpu}
    return parse_cpu_list(text) or {cpu}


def _kept(function: Callable[..., Any], jobs: list[tuple[Any, ...]]) -> Callable[..., Any]:
    def kept(*args: Any) -> Any:
        jobs.append(args)
        return function(*args)

    return kept


def messages(rank: int, ranks: int) -> Table:
    """Exchanges between two ranks, and between all of them, each with a message to each other one."""
    link, found = Link(dist.group.WORLD, rank), {}
    for size in SIZES:
        message = torch.zeros(size // 4)
        two, every = [1 - rank] if rank < 2 else [], [r for r in range(ranks) if r != rank]
        for name, others in (("of ranks 0 and 1", two), ("of all", every)):

            def exchanged(others: list[int] = others, x: Tensor = message) -> None:
                incoming = {r: [tuple(x.shape)] for r in others}
                link.start("", {r: [x] for r in others}, incoming, x.dtype, x.device).wait()

            found[f"{size >> 10} KiB each way, {name}"] = _timed(exchanged, 4)
    return found


def _memory() -> Table:
    """16 MiB of fresh memory, and a copy between memory that was used before."""
    x = torch.ones(1 << 22)
    y = torch.empty_like(x)
    fresh = _timed(lambda: torch.full((1 << 22,), 1.0), 4)
    return {"16 MiB of fresh memory, written": fresh, "16 MiB copied": _timed(lambda: y.copy_(x), 4)}


if __name__ == "__main__":
    main()
