"""What each attention call of simulated ranks puts on a device, forward and backward, found without one: the kernels it launches
and torch's own operations, beside the kernels of one call over the whole sequence.

The Hopper backend runs over the host's tensors, with kernels that do nothing (`host_stub`). The first round of calls, which makes
tile lists and plans, is not counted: what is listed is what every later call does.

    python -m tools.rank_operations --length 8192 --masks window documents
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tools import ranks
from tools.host_stub import Kernel, without_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.backends.gpu.record import Launch
from tilewise.backends.hopper import launch as forward
from tilewise.backends.hopper.backward import launch as backward
from tilewise.distributed.context import plan
from tilewise.distributed.rehearsal import Rehearsal
from tilewise.distributed.segments import SIDE_BY_SIDE, Call, Segment
from tilewise.problem import Problem

HOST_ONLY = (
    *("empty", "new_empty", "view", "as_strided", "slice", "select", "transpose", "expand", "alias", "detach", "unsqueeze"),
    "split",
)
"""What an operation's name begins with that puts nothing on a device."""


class Operations(TorchDispatchMode):
    """The names of kernels, and while it is entered of torch's operations, in the order of the host's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].lstrip("_")
        if not name.startswith(HOST_ONLY):
            self.names.append(f"aten.{name}")
        return func(*args, **(kwargs or {}))

    def taken(self) -> tuple[str, ...]:
        """Since the last question."""
        found, self.names = tuple(self.names), []
        return found

    def compiled(self, launch: Launch) -> Any:
        return launch.kernel if launch.options is None else self.kernel(launch.kernel.__name__)

    def kernel(self, name: str) -> Kernel:
        """One that does nothing but give its name."""
        found = Kernel()
        found.launch = lambda *_: self.names.append(name)
        return found


@contextmanager
def noted() -> Iterator[Operations]:
    """Meanwhile GPU calls over CPU tensors run without their kernels, and what they launch is noted."""
    found = Operations()
    with ExitStack() as stack:
        add = stack.enter_context
        add(without_gpu())
        for launches in (forward, backward):
            add(patch.object(launches, "kernel_for", lambda name, *_: found.kernel(name)))
        add(patch.object(Launch, "compiled", lambda one: found.compiled(one)))
        add(patch.dict(SIDE_BY_SIDE, {"cpu": SIDE_BY_SIDE["cuda"]}))
        yield found


@dataclass(frozen=True, eq=False)
class NotedCall(Call):
    """A call whose operations are noted: (pass, segment, their names)."""

    operations: list[Operations] = field(default_factory=list)
    made: list[tuple[str, Segment, tuple[str, ...]]] = field(default_factory=list)

    def _noted(self, pass_: str, segment: Segment, run: Callable[..., Any], *args: Any) -> Any:
        if not self.operations:
            return run(segment, *args)
        (one,) = self.operations
        one.taken()
        with one:
            found = run(segment, *args)
        self.made.append((pass_, segment, one.taken()))
        return found

    def forward(self, segment: Segment, *args: Any) -> Any:
        return self._noted("forward", segment, super().forward, *args)

    def backward(self, segment: Segment, *args: Any) -> Any:
        return self._noted("backward", segment, super().backward, *args)


class Made(NamedTuple):
    """A call, by what it is, and what it put on the device."""

    pass_: str
    names: tuple[str, ...]
    call: str


def operations(problem: Problem, count: int) -> Iterator[Made]:
    """Of one call, and of every call of so many ranks."""
    with noted() as found:
        sides = ((problem.heads, problem.head_dim), *[(problem.kv_heads, problem.head_dim)] * 2)
        dtype = getattr(torch, problem.dtype)
        q, k, v = (torch.zeros(problem.batch, heads, problem.seqlen_q, dim, dtype=dtype) for heads, dim in sides)
        dout = torch.zeros_like(q)
        alone = ranks._Alone(problem, (q, k, v), dout)
        for round_ in range(2):
            for pass_ in ranks.PASSES:
                found.taken()
                getattr(alone, pass_)()
                if round_:
                    yield Made(pass_, found.taken(), "one call")
        run = Rehearsal(plan(problem, ranks=count, device=ranks.SPEC, heads=1), q, k, v, dout, kind=NotedCall)
        for round_ in range(2):
            for number, rank in enumerate(run.ranks):
                if round_:
                    rank.call.operations.append(found)
                rank.forward()
                rank.backward()
                for pass_, segment, names in rank.call.made:
                    block = segment.block
                    groups = f", {len(block.groups)} groups" if block.groups else ""
                    mask = segment.problem.program.structure or "full"
                    yield Made(pass_, names, f"rank {number}: {block.sizes[0]}×{block.sizes[1]} {mask}{groups}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ranks": 8, "length": 65536, "query-heads": 16, "kv-heads": 16, "dim": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--masks", nargs="*", help="of those of tools.ranks; all")
    options = parser.parse_args(arguments)
    for name, mask in ranks.masks(options.length, "cpu").items():
        if options.masks and name not in options.masks:
            continue
        problem = Problem.of(
            heads=options.query_heads, kv_heads=options.kv_heads, seqlen=options.length, head_dim=options.dim,
            dtype="bfloat16", mask=mask, needs_grad=True, needs_lse=False, device="cpu",
        )  # fmt: skip
        found = sorted(operations(problem, options.ranks))
        for (pass_, names), some in groupby(found, key=lambda one: one[:2]):
            print(f"{name} {pass_}: {', '.join(names)}", *(f"    {one.call}" for one in some), sep="\n", flush=True)


if __name__ == "__main__":
    main()
