"""What a call costs beside its arithmetic: tw.attention over a do-nothing backend against all of SDPA, tiny tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import dispatch
from tilewise.api.attention import attention
from tilewise.api.names import BackendName
from tilewise.backends.base import Backend, BackwardInputs, Grads, Inputs, Verdict, empty_lse, empty_out
from tilewise.hardware.timers import Run, wall_clock
from tilewise.lab.bench.timing import Effort, Progress, Spread, interleave, ratio, silent
from tilewise.masks import causal
from tilewise.problem import Problem

LIMIT = 1.5  # a call may cost this many SDPA calls
NULL, SDPA = "tilewise, null backend", "sdpa"


class NullBackend(Backend):
    """Computes nothing: what is left of a call is what tilewise adds to it."""

    name = "null"

    def usable(self, device: str) -> Verdict:
        return Verdict(True)

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        return Verdict(True)

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        return "computes nothing"

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q)

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        return Grads(inputs.q, inputs.k, inputs.v)


backend = NullBackend()


@contextmanager
def null_backend() -> Iterator[str]:
    """Registers it for a while, by the name this gives."""
    dispatch.register(backend.name, dispatch.Entry(__name__, ("cpu", "cuda")))
    try:
        yield backend.name
    finally:
        del dispatch.REGISTRY[backend.name]


def pairs(backend: BackendName) -> dict[str, tuple[Run, Run, float | None]]:
    """By name: our call, SDPA's, and the most ours may cost; training has no limit set."""
    q, k, v = (torch.randn(1, 1, 16, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout, mask = torch.ones_like(q), causal()

    def train(call: Callable[..., Any], **options: Any) -> Run:
        return lambda: torch.autograd.grad(call(*leaves, **options), leaves, dout)

    sdpa = F.scaled_dot_product_attention
    return {
        "plain": (lambda: attention(q, k, v, backend=backend), lambda: sdpa(q, k, v), LIMIT),
        "causal": (lambda: attention(q, k, v, mask=mask, backend=backend), lambda: sdpa(q, k, v, is_causal=True), LIMIT),
        "fwd+bwd": (train(attention, backend=backend), train(sdpa), None),
    }


def measure_overhead(effort: Effort, on_progress: Progress = silent) -> list[dict[str, Any]]:
    """Every pair, its two sides taking turns: their times, and the cost of ours in SDPA calls."""
    found: list[dict[str, Any]] = []
    with null_backend() as name:
        for label, (ours, theirs, limit) in pairs(cast(BackendName, name)).items():
            timers = {NULL: partial(wall_clock, ours), SDPA: partial(wall_clock, theirs)}
            samples = interleave(timers, effort, partial(on_progress, label))
            seconds = {side: Spread.of(values)._asdict() for side, values in samples.items()}
            cost = ratio(samples[NULL], samples[SDPA])
            passed = None if limit is None else cost.p50 <= limit
            found.append({"name": label, "seconds": seconds, "cost": cost._asdict(), "limit": limit, "passed": passed})
    return found
