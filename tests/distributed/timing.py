"""Wall time of context parallelism on this machine: processes of one thread beside one process of as many, and the prediction.

    python -m tests.distributed.timing --ranks 2 --length 8192
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

import tilewise as tw
from tests.distributed.ranks import run_ranks
from tilewise.hardware.probe import probe_cpu

Times = tuple[float, float]
"""Seconds of a forward and of a backward."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("length", 8192), ("heads", 8), ("kv-heads", 8), ("calls", 5), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    shape = (options.heads, options.kv_heads, options.length)
    alone, shared, expected = [], [], (0.0, 0.0)
    for _ in range(options.rounds):  # in turn, so that both meet the same machine
        alone += run(1, single, shape, options.ranks, options.calls)[0]
        found = run(options.ranks, parallel, shape, options.calls)
        shared += [(max(x[0] for x in calls), max(x[1] for x in calls)) for calls in zip(*(r[0] for r in found), strict=True)]
        expected = found[0][1]
    one, many = (tuple(median(x[i] for x in times) for i in (0, 1)) for times in (alone, shared))
    print(f"1×{options.heads}×{options.length}×64, {options.kv_heads} key heads, causal, float32, {options.ranks} processes, ms")
    print(f"{'':10} {'1 process':>10} {'processes':>10} {'predicted':>10} {'predicted/measured':>20} {'rate kept':>10}")
    rows = [*zip(("forward", "backward"), one, many, expected, strict=True), ("both", sum(one), sum(many), sum(expected))]
    for name, a, b, p in rows:
        print(f"{name:10} {1e3 * a:10.1f} {1e3 * b:10.1f} {1e3 * p:10.1f} {p / b:20.3f} {a / b:10.3f}")


def run(ranks: int, task: Callable[..., object], *args: object) -> list[object]:
    with tempfile.TemporaryDirectory() as place:
        answers = run_ranks(ranks, task, *args, store=Path(place) / "store")
    if failed := [answer for answer in answers if isinstance(answer, str)]:
        raise SystemExit("\n".join(failed))
    return answers


def leaves(shape: tuple[int, int, int]) -> tuple[list[Tensor], tw.Problem]:
    heads, kv_heads, length = shape
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn((1, n, length, 64), generator=g) for n in (heads, kv_heads, kv_heads)]
    problem = tw.Problem.of(heads=heads, kv_heads=kv_heads, seqlen=length, head_dim=64, dtype="float32", mask=tw.causal())
    return tensors, problem


def timed(call: Callable[[], Tensor], inputs: list[Tensor], calls: int) -> list[Times]:
    times = []
    for _ in range(calls + 2):
        dist.barrier()
        start = time.perf_counter()
        out = call()
        middle = time.perf_counter()
        dist.barrier()
        again = time.perf_counter()
        torch.autograd.grad(out, inputs, out.detach())
        times.append((middle - start, time.perf_counter() - again))
    return times[2:]


def single(rank: int, shape: tuple[int, int, int], threads: int, calls: int) -> list[Times]:
    torch.set_num_threads(threads)
    inputs = [x.requires_grad_() for x in leaves(shape)[0]]
    return timed(lambda: tw.attention(*inputs, mask=tw.causal()), inputs, calls)


def parallel(rank: int, shape: tuple[int, int, int], calls: int) -> tuple[list[Times], Times]:
    tensors, problem = leaves(shape)
    device = tw.distributed.measure_links(dist.group.WORLD, probe_cpu(1), problem)
    plan = tw.distributed.plan(problem, dist.group.WORLD, device=device)
    inputs = [plan.shard(x, 2).requires_grad_() for x in tensors]
    times = timed(lambda: tw.distributed.attention(*inputs, plan), inputs, calls)
    return times, (plan.predict().seconds, plan.predict(backward=True).seconds)


if __name__ == "__main__":
    main()
