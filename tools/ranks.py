"""What context parallelism leaves of a kernel's rate: every rank's passes, one after another on one device, beside one call.

Ranks run as in a `Rehearsal`, with the messages that real ones would receive, so what is timed are the calls of each stage as
planned. Time is the device's: a GPU is kept busy until the host has launched a whole pass.

    python -m tools.ranks --device cuda --length 65536
    python -m tools.ranks --calls                          # only which calls these are, as planned for an H200: needs no GPU
    python -m tools.ranks --profile 0 --masks window       # what runs on the device in both passes of rank 0, and of one call
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from tools.rank_calls import show_calls
from torch import Tensor

from tilewise.api.attention import attention
from tilewise.backends.base import BackwardInputs, Grads
from tilewise.distributed.context import plan
from tilewise.distributed.rehearsal import Rank, Rehearsal
from tilewise.distributed.segments import Call, Local, Segment
from tilewise.errors import TilewiseError
from tilewise.masks import Mask, causal, documents, full, window
from tilewise.problem import Problem

AHEAD = 30_000_000
"""Cycles that a GPU waits before a timed pass, while the host launches it."""
ROUNDS = 5
LINES, NAME = 24, 100
"""Of a profile."""
WINDOW = 1024
"""The narrow one, where sequences are long enough."""
SCORE = 8
"""Scores of normally distributed tokens are hardly ever larger."""
PASSES = ("forward", "backward")
SPEC = "h200"
"""What is planned for."""


class WrongResultError(TilewiseError, ArithmeticError):
    """Ranks do not compute what one call does, so their speed means nothing."""


class Watch:
    """Seconds of the pieces of work that it is told of, by the clock of a device."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.marks: list[tuple[Any, Any]] = []

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        start = self._mark()
        found = work(*args)
        self.marks.append((start, self._mark()))
        return found

    def _mark(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def taken(self) -> list[float]:
        """Seconds of each piece since the last question."""
        marks, self.marks = self.marks, []
        if not self.gpu:
            return [end - start for start, end in marks]
        torch.cuda.synchronize()
        return [1e-3 * start.elapsed_time(end) for start, end in marks]


@dataclass(frozen=True, eq=False)
class WatchedCall(Call):
    """A call whose kernels are timed."""

    watches: dict[str, Watch] = field(default_factory=dict)

    @property
    def watch(self) -> Watch:
        if "kernels" not in self.watches:
            self.watches["kernels"] = Watch(self.device)
        return self.watches["kernels"]

    def forward(self, segment: Segment, local: Local, tokens: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.watch.run(super().forward, segment, local, tokens)
        return found

    def backward(
        self, segment: Segment, local: Local, tokens: tuple[Tensor, Tensor, Tensor], given: BackwardInputs
    ) -> Grads:
        found: Grads = self.watch.run(super().backward, segment, local, tokens, given)
        return found


@dataclass(frozen=True)
class Kept:
    """How much of one call's rate the ranks of a plan keep, in one pass. Seconds are medians.

    single: of one call over the whole sequence. kernels: of the attention calls of all stages of all ranks together.
    passes: of all that the ranks do on the device, merging, adding and packing of messages too. slowest: of one rank.
    """

    mask: str
    pass_: str
    ranks: int
    heads: int
    stages: int
    calls: int
    single: float
    kernels: float
    passes: float
    slowest: float

    @property
    def rate(self) -> float:
        """Of the kernels, summed over ranks, as a part of the single call's."""
        return self.single / self.kernels

    @property
    def whole_rate(self) -> float:
        """The same of everything."""
        return self.single / self.passes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rate": self.rate, "whole_rate": self.whole_rate}


def measure(
    problem: Problem, ranks: int, device: str, *, heads: int | None = 1, spec: str = SPEC, rounds: int = ROUNDS
) -> list[Kept]:
    """The rate that so many ranks keep, forward and backward. Raises if their results are not those of one call.

    heads: how many ranks share the heads; None for what the plan chooses on `spec`.
    """
    found, alone = settled(problem, ranks, device, heads=heads, spec=spec)
    _compare(found, alone)
    return list(_timed(found, alone, Watch(found.q.device), rounds))


def settled(
    problem: Problem, ranks: int, device: str, *, heads: int | None = 1, spec: str = SPEC
) -> tuple[Rehearsal, _Alone]:
    """Ranks whose messages are right, and the single call; all have run."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, problem.dtype)

    def draw(count: int, dim: int) -> Tensor:
        sides = (problem.batch, count, problem.seqlen_q, dim)
        return torch.randn(sides, generator=generator, device=device, dtype=torch.float32).to(dtype)

    q, dout = draw(problem.heads, problem.head_dim), draw(problem.heads, problem.head_dim_v)
    k, v = draw(problem.kv_heads, problem.head_dim), draw(problem.kv_heads, problem.head_dim_v)
    found = Rehearsal(plan(problem, ranks=ranks, device=spec, heads=heads), q, k, v, dout, kind=WatchedCall)
    alone = _Alone(problem, (q, k, v), dout)
    found.settle()
    alone.forward()
    alone.backward()
    return found, alone


def profile(one: Rank | _Alone, rounds: int = ROUNDS) -> Iterator[str]:
    """A line for all that runs on the device in a forward and a backward, the longest first: its name, how often, and the
    microseconds of it in one round."""
    device = one.results[0].device if isinstance(one, Rank) else one.out.device
    kind = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind], acc_events=True) as found:
        for _ in range(rounds):
            one.forward()
            one.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
    rows = [(row.self_device_time_total or row.self_cpu_time_total, row.count, row.key) for row in found.key_averages()]
    yield f"{'µs':>9} {'count':>6}  name"
    yield from (f"{took / rounds:9.1f} {count / rounds:6.1f}  {name[:NAME]}" for took, count, name in sorted(rows)[::-1][:LINES])


class _Alone:
    """One call over the whole sequence."""

    def __init__(self, problem: Problem, qkv: Sequence[Tensor], dout: Tensor) -> None:
        self.leaves = tuple(x.detach().requires_grad_() for x in qkv)
        self.mask, self.dout = problem.mask, dout
        self.out: Tensor
        self.grads: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        self.out = attention(*self.leaves, mask=self.mask)

    def backward(self) -> None:
        self.grads = torch.autograd.grad(self.out, self.leaves, self.dout)


def _timed(found: Rehearsal, alone: _Alone, watch: Watch, rounds: int) -> Iterator[Kept]:
    ranks, plan = found.ranks, found.plan
    single: dict[str, list[float]] = {name: [] for name in PASSES}
    passes: dict[str, list[list[float]]] = {name: [] for name in PASSES}
    kernels: dict[str, list[list[list[float]]]] = {name: [] for name in PASSES}
    for _ in range(rounds):
        for name in PASSES:  # in turn, so that all meet the same clocks
            single[name].append(_seconds(watch, getattr(alone, name)))
            passes[name].append([])
            kernels[name].append([])
            for rank in ranks:
                rank.call.watch.taken()  # type: ignore[attr-defined]  # a WatchedCall
                passes[name][-1].append(_seconds(watch, getattr(rank, name)))
                kernels[name][-1].append(rank.call.watch.taken())  # type: ignore[attr-defined]
    for name in PASSES:
        yield Kept(
            mask=str(found.plan.problem.mask),
            pass_=name,
            ranks=plan.ranks,
            heads=plan.heads,
            stages=len(plan.stages),
            calls=sum(map(len, kernels[name][0])),
            single=median(single[name]),
            kernels=median(sum(map(sum, one)) for one in kernels[name]),
            passes=median(map(sum, passes[name])),
            slowest=median(map(max, passes[name])),
        )


def _seconds(watch: Watch, run: Callable[[], None]) -> float:
    if watch.gpu:
        torch.cuda._sleep(AHEAD)
    watch.run(run)
    return watch.taken()[0]


def _compare(found: Rehearsal, alone: _Alone) -> None:
    """Both round: one partial result for each stage, the sum, and the single call's own. Scores are rounded in fp32, and their
    exponentials are as many times as far off as a score is large."""
    stored, real = (torch.finfo(dtype).eps / 2 for dtype in (found.q.dtype, torch.float32))
    limit = (2 + len(found.plan.stages)) * stored + 2 * SCORE * real
    for name, got, want in zip(("out", "dq", "dk", "dv"), found.results(), (alone.out.detach(), *alone.grads), strict=True):
        error = float((got.double() - want.double()).norm() / want.double().norm())
        if not error <= limit:
            ranks = found.plan.ranks
            raise WrongResultError(f"{name} of {ranks} ranks is {error:.1e} off the single call's; {limit:.1e} are allowed")


def masks(length: int, device: str) -> dict[str, Mask]:
    """The masks that are measured; documents have 1/64 to a fifth of the tokens."""
    generator, lengths = torch.Generator().manual_seed(0), list[int]()
    while sum(lengths) < length:
        lengths.append(int(torch.randint(max(length // 64, 1), max(length // 5, 2), (1,), generator=generator)))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[:length].to(device)
    return {
        "full": full(),
        "causal": causal(),
        "documents": causal() & documents(ids),
        "window": causal() & window(min(max(length // 64, 1), WINDOW)),
        "wide window": causal() & window(max(length // 4, 1)),
    }


def show(row: Kept, name: str) -> str:
    times = " ".join(f"{1e3 * seconds:9.3f}" for seconds in (row.single, row.kernels, row.passes, row.slowest))
    return f"{name:12} {row.pass_:8} {row.calls:5} {times} {row.rate:8.3f} {row.whole_rate:6.3f}"


HEADER = (
    f"{'mask':12} {'pass':8} {'calls':>5} {'one call':>9} {'kernels':>9} {'all':>9} {'slowest':>9} {'kernels':>8} {'all':>6}"
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"ranks": 8, "length": 65536, "query-heads": 16, "kv-heads": 16, "dim": 128, "share": 1, "rounds": ROUNDS}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--masks", nargs="*", help="of: full, causal, documents, window, wide window; all")
    parser.add_argument("--json", help="a file for the rows")
    parser.add_argument("--calls", action="store_true", help="list the calls of every rank and their predicted times instead")
    parser.add_argument("--profile", type=int, metavar="RANK", help="what runs in this rank's passes instead")
    options = parser.parse_args(arguments)
    if options.profile is not None and not 0 <= options.profile < options.ranks:
        parser.error(f"--profile: got {options.profile}, need a rank from 0 to {options.ranks - 1}")
    if options.calls:
        options.device = "cpu"
    rows = []
    heads = f"{options.query_heads}/{options.kv_heads}"
    print(f"{options.ranks} ranks, 1×{heads}×{options.length}×{options.dim}, {options.dtype}, ms")
    if not options.calls and options.profile is None:
        print(HEADER, flush=True)
    for name, mask in masks(options.length, options.device).items():
        if options.masks and name not in options.masks:
            continue
        problem = Problem.of(
            heads=options.query_heads, kv_heads=options.kv_heads, seqlen=options.length, head_dim=options.dim,
            dtype=options.dtype, mask=mask, needs_grad=True, needs_lse=False, device=options.device,
        )  # fmt: skip
        if options.calls:
            planned = plan(replace(problem, device="cuda"), ranks=options.ranks, device=SPEC, heads=options.share or None)
            print(f"{name}: {len(planned.stages)} stages", *show_calls(planned, SPEC), sep="\n", flush=True)
            continue
        if options.profile is not None:
            found, alone = settled(problem, options.ranks, options.device, heads=options.share or None)
            print(f"{name}, rank {options.profile}:", *profile(found.ranks[options.profile], options.rounds), sep="\n")
            print(f"{name}, one call:", *profile(alone, options.rounds), sep="\n", flush=True)
            continue
        for row in measure(problem, options.ranks, options.device, heads=options.share or None, rounds=options.rounds):
            print(show(row, name), flush=True)
            rows.append(row.to_dict() | {"name": name, "length": options.length, "query_heads": options.query_heads})
        if options.json:
            with open(options.json, "w") as file:
                json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
