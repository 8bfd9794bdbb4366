"""The Hopper forward on a Hopper GPU where its steps weigh twice: scores that leave the m that is there, rows beside others."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.numerics import checks
from tilewise import dispatch
from tilewise.backends.base import Inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not dispatch.usable("hopper", "cuda").ok, reason="hopper is not usable here"),
]
DEVICE, QUERIES, KEYS = "cuda", 1400, 1500
MASKS = [None, tw.causal()]
BF16, FP16 = torch.bfloat16, torch.float16


def made(d: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(d)
    return [torch.randn(1, 3, n, d, dtype=dtype, device=DEVICE, generator=generator) for n in (QUERIES, KEYS, KEYS)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    ("rise", "dtype"), [(0.5, BF16), (3.0, BF16), (20.0, BF16), (400.0, BF16), (-20.0, BF16), (3.0, FP16), (20.0, FP16)]
)
@pytest.mark.parametrize("d", [32, 64, 96, 128, 256])
def test_scores_that_rise(d: int, rise: float, dtype: torch.dtype, mask: tw.Mask | None) -> None:
    """Key tiles are visited from the right, and each 32 keys have scores higher by `rise` / 4 than those before."""
    q, k, v = made(d, dtype)
    q[..., 0] = 1
    k[..., 0] += (rise * d**0.5 / 4 * (torch.arange(KEYS, 0, -1, device=DEVICE) // 32)).to(dtype)
    sizes = {"batch": 1, "heads": 3, "seqlen": QUERIES, "kv_seqlen": KEYS, "head_dim": d}
    problem = tw.Problem.of(**sizes, dtype=str(dtype).removeprefix("torch."), mask=mask, device=DEVICE)
    out, lse = tw.attention(q, k, v, mask=mask, return_lse=True, backend="hopper")
    assert checks.check_forward(problem, Inputs(q, k, v), out, lse) == []


@pytest.mark.parametrize("garbage", [1000.0, float("nan")])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_row_does_not_depend_on_others(d: int, mask: tw.Mask | None, garbage: float) -> None:
    """Rows of a warp take a branch together; what it does to one is its own affair."""
    q, k, v = made(d)
    want = tw.attention(q, k, v, mask=mask, return_lse=True, backend="hopper")
    theirs = torch.arange(QUERIES, device=DEVICE) % 3 == 1
    q[:, :, theirs] *= garbage
    found = tw.attention(q, k, v, mask=mask, return_lse=True, backend="hopper")
    assert all(torch.equal(x[:, :, ~theirs], y[:, :, ~theirs]) for x, y in zip(found, want, strict=True))
    assert bool(found[0][:, :, theirs].isnan().all()) == (garbage != garbage)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_future_does_not_change_the_past(d: int) -> None:
    q, k, v = made(d)
    past = QUERIES - 517
    want = tw.attention(q, k, v, mask=tw.causal(), backend="hopper")
    for x in (q, k, v):
        x[:, :, x.shape[2] - 517 :] *= 1000.0
    found = tw.attention(q, k, v, mask=tw.causal(), backend="hopper")
    assert torch.equal(found[:, :, :past], want[:, :, :past]) and not torch.equal(found, want)
