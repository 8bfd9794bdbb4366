"""Peak memory of `tiled`, and of derivatives on `cpu`, grows linearly with the sequence, counted allocation by allocation."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tilewise as tw
from tilewise.masks import Mask

HEAD_DIM = 8


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes alive at once beyond those alive at the start, from every allocation and release of torch's."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = call()
    assert record.profiler is not None
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert alive >= sum(x.numel() * x.element_size() for x in kept), "what is returned must have been seen"
    return peak


def forward(seqlen: int, mask: Mask | None, backend: str) -> int:
    q, k, v = (torch.randn(1, 1, seqlen, HEAD_DIM) for _ in range(3))
    return peak_bytes(lambda: tw.attention(q, k, v, mask=mask, backend=backend, return_lse=True))


def both(seqlen: int, mask: Mask | None, backend: str) -> int:
    q, k, v = (torch.randn(1, 1, seqlen, HEAD_DIM, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 1, seqlen, HEAD_DIM)

    def call() -> Sequence[torch.Tensor]:
        return torch.autograd.grad(tw.attention(q, k, v, mask=mask, backend=backend), (q, k, v), dout)

    return peak_bytes(call)


def jvp(seqlen: int, mask: Mask | None, backend: str) -> int:
    q, k, v = (torch.randn(1, 1, seqlen, HEAD_DIM) for _ in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, mask=mask, backend=backend)

    return peak_bytes(lambda: torch.func.jvp(attend, (q, k, v), (q, k, v)))


def twice(seqlen: int, mask: Mask | None, backend: str) -> int:
    q, k, v = (torch.randn(1, 1, seqlen, HEAD_DIM, requires_grad=True) for _ in range(3))

    def call() -> Sequence[torch.Tensor]:
        out = tw.attention(q, k, v, mask=mask, backend=backend)
        first = torch.autograd.grad(out, (q, k, v), out.detach(), create_graph=True)
        return torch.autograd.grad(first, (q, k, v), [x.detach() for x in first])

    return peak_bytes(call)


def forward_over_reverse(seqlen: int, mask: Mask | None, backend: str) -> int:
    q, k, v = (torch.randn(1, 1, seqlen, HEAD_DIM) for _ in range(3))

    def energy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, mask=mask, backend=backend).sum()

    gradient = torch.func.grad(energy, (0, 1, 2))
    return peak_bytes(lambda: [x for part in torch.func.jvp(gradient, (q, k, v), (q, k, v)) for x in part])


def watched(seqlen: int, mask: Mask | None, backend: str) -> int:
    q, k, v = (torch.randn(1, 1, seqlen, HEAD_DIM, requires_grad=True) for _ in range(3))

    def call() -> Sequence[torch.Tensor]:
        stats = ("max_logit", "entropy", "key_mass", tw.top(4))
        out, seen = tw.attention(q, k, v, mask=mask, backend=backend, stats=stats)
        return torch.autograd.grad(out.sum() + seen.entropy.sum(), (q, k, v))

    return peak_bytes(call)


LENGTHS = (2048, 16384) if os.environ.get("TILEWISE_LONG") else (512, 4096)


@pytest.mark.parametrize("backend", ["tiled", "cpu"])
@pytest.mark.parametrize("call", [jvp, twice, forward_over_reverse, watched])
def test_memory_of_derivatives_grows_linearly(call: Callable[..., int], backend: str) -> None:
    """Eight times the tokens take at most 8.5 times the memory, statistics too; with TILEWISE_LONG=1 at 2k and 16k."""
    mask = tw.causal()
    call(64, mask, backend)  # what the first call sets up is not counted
    short, long = (call(n, mask, backend) for n in LENGTHS)
    assert long <= 8.5 * short, (short, long)


# the vectors a row may cost: out and lse; with the backward also dq, dk, dv, the sums of dk and dv, delta, and a spare
ROWS = {forward: 1 + 1, both: 1 + 1 + 3 + 2 + 1 + 1}


@pytest.mark.parametrize("call", [forward, both], ids=["forward", "forward and backward"])
@pytest.mark.parametrize(
    ("mask", "lengths"),
    [(tw.causal() & tw.window(512), (2048, 4096, 8192, 16384)), (None, (1024, 2048, 4096))],
    ids=["window", "full"],
)
def test_memory_grows_linearly(call: Callable[..., int], mask: Mask | None, lengths: tuple[int, ...]) -> None:
    call(lengths[0], mask, "tiled")  # what the first call sets up is not counted
    peaks = [call(n, mask, "tiled") for n in lengths]
    steps = [after - before for before, after in pairwise(peaks)]
    for before, after in pairwise(steps):
        assert after == pytest.approx(2 * before, rel=0.15), f"{peaks}: each doubling adds twice what the last one did"
    assert steps[-1] <= ROWS[call] * 4 * HEAD_DIM * (lengths[-1] - lengths[-2]), (
        f"{peaks}: more than O(1) vectors a row"
    )
    assert peaks[-1] < lengths[-1] ** 2, f"{peaks}: even one byte for each score would be more"


def test_the_meter_sees_quadratic_memory() -> None:
    peaks = [forward(n, None, "reference") for n in (512, 1024, 2048)]
    for before, after in pairwise(peaks):
        assert after == pytest.approx(4 * before, rel=0.15)
    assert peaks[-1] >= 4 * 2048**2
