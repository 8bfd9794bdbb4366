"""What a call costs beside its arithmetic: tw.attention over a do-nothing backend against all of SDPA, tiny tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from tilewise.api.attention import attention
from tilewise.api.names import BackendName
from tilewise.hardware.timers import Run, wall_clock
from tilewise.lab.bench.null import null_backend
from tilewise.lab.bench.timing import Effort, Spread, interleave, ratio
from tilewise.masks import causal

LIMIT = 1.5  # a call may cost this many SDPA calls
NULL, SDPA = "tilewise, null backend", "sdpa"


@dataclass
class Overhead:
    name: str
    null: Spread
    sdpa: Spread
    cost: Spread  # in SDPA calls
    limit: float | None

    @property
    def passed(self) -> bool | None:
        return None if self.limit is None else self.cost.p50 <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds": {NULL: self.null._asdict(), SDPA: self.sdpa._asdict()},
            "cost": self.cost._asdict(),
            "limit": self.limit,
            "passed": self.passed,
        }


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
        "causal": (
            lambda: attention(q, k, v, mask=mask, backend=backend),
            lambda: sdpa(q, k, v, is_causal=True),
            LIMIT,
        ),
        "fwd+bwd": (train(attention, backend=backend), train(sdpa), None),
    }


def measure_overhead(effort: Effort, on_progress: Callable[[str, float], None] | None = None) -> list[Overhead]:
    """Every pair, its two sides taking turns."""
    say = on_progress or (lambda what, share: None)
    found = []
    with null_backend() as name:
        for label, (ours, theirs, limit) in pairs(cast(BackendName, name)).items():
            timers = {NULL: partial(wall_clock, ours), SDPA: partial(wall_clock, theirs)}
            samples = interleave(timers, effort, partial(say, label))
            spreads = (Spread.of(samples[NULL]), Spread.of(samples[SDPA]))
            found.append(Overhead(label, *spreads, ratio(samples[NULL], samples[SDPA]), limit))
    return found
