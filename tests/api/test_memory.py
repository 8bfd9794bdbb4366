"""Peak memory of `tiled` grows linearly with the sequence, counted allocation by allocation."""

from __future__ import annotations

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
