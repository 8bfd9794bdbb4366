"""Every kernel that runs on the device in one call over a cache, with its microseconds, and the time of a call in a CUDA graph.

    python -m tools.cache_times --case shared/16 --case "decode/16 1×16/1×8192"
    python -m tools.cache_times --case shared/16 --contenders tilewise unshared cache-cudnn
    python -m tools.cache_times --case shared/16 --tile 64x64x3x4 --splits 8     # another tile and number of parts, where more
                                                                                 # than 64 rows are decoded
    python -m tools.cache_times --case decode/16 --list                          # the cases of these words, without a GPU
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from tilewise.backends.triton import paged
from tilewise.hardware.timers import clock_for
from tilewise.lab.bench import caches
from tilewise.lab.bench.cache_suites import CACHE_GPU
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.peers import contender
from tilewise.lab.bench.timing import Timer
from tilewise.model import TilePlan
from tilewise.problem import DECODE_ROWS

CALLS = 64
"""That are profiled, at most: each over another cache where there are as many."""
ROUNDS = 5
NAME = 100


class Tile(NamedTuple):
    """What a launch of many rows is to have in place of its plan; 0 for what the plan says."""

    rows: int = 0
    keys: int = 0
    stages: int = 0
    warps: int = 0
    splits: int = 0

    @classmethod
    def parse(cls, text: str, splits: int) -> Tile:
        """From "rows x keys x stages x warps"."""
        numbers = [int(n) for n in text.split("x")] if text else [0] * 4
        if len(numbers) != 4 or any(n & (n - 1) for n in (*numbers[:2], numbers[3])):
            raise argparse.ArgumentTypeError(f"--tile: got {text!r}, need rows, keys, stages and warps, such as 64x64x3x4")
        return cls(*numbers, splits)

    def of(self, plan: TilePlan) -> TilePlan:
        names = ("block_q", "block_k", "stages", "warps", "splits")
        return replace(plan, **{name: n for name, n in zip(names, self, strict=True) if n})


@contextmanager
def instead(tile: Tile) -> Iterator[None]:
    """Decoding of more than DECODE_ROWS rows has this tile."""
    planned = paged.paged_tiles

    def tiles(problem: Any, *more: Any) -> dict[str, TilePlan]:
        found = planned(problem, *more)
        rows = -(-problem.seqlen_q // max(1, problem.batch)) * problem.group
        if rows > DECODE_ROWS and "decode" in found:
            found["decode"] = tile.of(found["decode"])
            if found["decode"].splits == 1:
                found.pop("merge", None)
        return found

    with mock.patch.object(paged, "paged_tiles", tiles):
        yield


class Row(NamedTuple):
    """A kernel of a call: microseconds of all its launches, and how many they are."""

    us: float
    count: float
    name: str


def kernels(call: Callable[[int], object], copies: int, device: str, rounds: int = ROUNDS) -> list[Row]:
    """What runs in one call, on average over the caches that take turns, the longest first."""
    on_gpu = device.startswith("cuda")
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    numbers = [n % copies for n in range(min(CALLS, copies * rounds))]
    for n in {*numbers[:2], numbers[0]}:  # kernels are compiled, and their launches recorded
        call(n), call(n)
    if on_gpu:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[kind], acc_events=True) as found:
        for n in numbers:
            call(n)
        if on_gpu:
            torch.cuda.synchronize()
    taken = [(row.self_device_time_total or row.self_cpu_time_total, row.count, row.key) for row in found.key_averages()]
    return sorted((Row(us / len(numbers), count / len(numbers), name) for us, count, name in taken), reverse=True)


def report(case: Case, name: str, *, rounds: int = ROUNDS) -> Iterator[str]:
    """Lines about a contender's call."""
    one = contender(name)
    verdict = one.supports(case)
    if not verdict.ok:
        yield f"{case.name}, {name}: {'; '.join(verdict.reasons)}"
        return
    form = one.form(case)
    given = caches.CacheTensors(form)
    call = one.bind(form, given)
    rows = kernels(call, caches.copies_of(form), form.device, rounds)
    timer: Timer = caches.Turns(form, call).timer(clock_for(form.device))
    timer(1)
    us = sorted(1e6 * timer(caches.copies_of(form)) for _ in range(rounds))[rounds // 2]
    all_of_them = sum(row.us for row in rows)
    where = "in a graph" if caches.cache_of(form).graph and form.device.startswith("cuda") else "as called"
    counted = sum(row.count for row in rows)
    yield f"{case.name}, {name}: {us:.1f} µs a call {where}; {counted:.1f} kernels, {all_of_them:.1f} µs together"
    yield f"{'µs':>9} {'count':>6} {'each':>8}  name"
    yield from (f"{row.us:9.2f} {row.count:6.1f} {row.us / row.count:8.2f}  {row.name[:NAME]}" for row in rows)


def chosen(words: Sequence[str]) -> list[Case]:
    """The cases of the suite whose name has one of the words."""
    return [case for case in CACHE_GPU if not words or any(word in case.name for word in words)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", default=[], metavar="WORD", help="a part of a case's name; again for more")
    parser.add_argument("--contenders", nargs="+", default=["tilewise"], help="tilewise, plain, unshared, cache-cudnn, …")
    parser.add_argument("--tile", default="", help="rows x keys x stages x warps, where more than 64 rows are decoded")
    parser.add_argument("--splits", type=int, default=0, help="parts of the keys there")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--list", action="store_true", help="only the names of the cases")
    options = parser.parse_args(arguments)
    try:
        tile = Tile.parse(options.tile, options.splits)
    except (argparse.ArgumentTypeError, ValueError) as error:
        parser.error(str(error))
    cases = chosen(options.case)
    if not cases:
        parser.error(f"--case: no case of cache-gpu has {' or '.join(options.case)} in its name")
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return
    for case in cases:
        for name in options.contenders:
            with instead(tile) if any(tile) else nullcontext():
                print(*report(replace(case, device=options.device), name, rounds=options.rounds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
