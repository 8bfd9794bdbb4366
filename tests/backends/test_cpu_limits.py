"""What must hold beyond the conformance cases: hidden values stay hidden, errors stay below torch's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("llvmlite")

import tilewise as tw
from tests.backends.test_cpu_memory import pretend

HIDING = {
    "padding": lambda n: tw.key_padding(torch.tensor([n - 7])),
    "window": lambda n: tw.window(5) & tw.key_padding(torch.tensor([n - 7])),
    "documents": lambda n: tw.documents(
        torch.where(torch.arange(n) < n - 7, 0, 9), q_ids=torch.zeros(n, dtype=torch.long)
    ),
    "dense": lambda n: tw.dense(torch.arange(n)[None, :].expand(n, n) < n - 7),
    "prefix-or": lambda n: tw.prefix(3) | (tw.window(4) & tw.prefix(n - 7)),
    "blocks": lambda n: tw.blocks(torch.tensor([[True, False]]).repeat(2, 1), (-(-n // 2), n - 7)),
}


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", HIDING)
def test_hidden_keys_never_reach_anything(name: str, poison: float) -> None:
    n = 53
    mask = HIDING[name](n)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=g) for _ in range(3))

    def run(k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = tw.attention(*leaves, mask=mask, backend="cpu", return_lse=True)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    clean = run(k, v)
    k, v = k.clone(), v.clone()
    k[:, :, -7:], v[:, :, -7:] = poison, poison
    for before, after in zip(clean, run(k, v), strict=True):
        assert torch.equal(before, after)


def test_a_hidden_bias_hides() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 20, 8, generator=g) for _ in range(3))
    bias = torch.zeros(1, 1, 20, 20)
    bias[..., -3:] = -math.inf
    clean = tw.attention(q, k, v, bias=bias, backend="cpu")
    v[:, :, -3:] = math.nan
    k[:, :, -3:] = math.inf
    assert torch.equal(tw.attention(q, k, v, bias=bias, backend="cpu"), clean)


SMALL = 0.9 * 2**-20  # is lost when added to a number of 16 or more in fp32: half of its last place is 2**-20


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_score_of_the_first_rows_is_four_sums(dim: int) -> None:
    """A large product and many small ones: those are lost that share its sum."""
    near = SMALL**0.5
    q, k, v = (torch.zeros(1, 1, 40, dim) for _ in range(3))
    q[..., 0], q[..., 1:], k[..., 0], k[..., 0, 1:] = 1.0, near, 17.0, near
    v[..., 0, 0], v[..., 1, 0] = 1.0, -1.0
    out = tw.attention(q, k, v, mask=tw.causal(), scale=math.log(2), backend="cpu").double()  # scores in units of log 2
    kept = out[0, 0, 1, 0].atanh() * 2 / math.log(2) / SMALL  # p0 - p1 = tanh((s0 - s1) / 2)
    assert abs(kept / dim - 3 / 4) < 1 / 16


def test_a_causal_mask_that_hides_little_spares_no_care() -> None:
    """Queries at the end of many keys: no row before them has larger errors, and a score is more than one sum."""
    near, dim = SMALL**0.5, 128
    q, k, v = (torch.zeros(1, 1, n, dim) for n in (40, 600, 600))
    q[..., 0], q[..., 1:], k[..., 0], k[..., 0, 1:] = 1.0, near, -20.0, near
    k[..., :2, 0] = 17.0
    v[..., 0, 0], v[..., 1, 0] = 1.0, -1.0
    out = tw.attention(q, k, v, mask=tw.causal(), scale=math.log(2), backend="cpu").double()
    kept = out[..., 0].atanh() * 2 / math.log(2) / SMALL
    assert (kept / dim).min() > 3 / 8


def test_an_output_of_few_keys_is_four_sums() -> None:
    """A large value and many small ones: those are lost that share its sum, of a quarter of a block of keys."""
    q, k, v = (torch.zeros(1, 1, 128, 16) for _ in range(3))
    v[..., 0, :], v[..., 1:, :] = 17.0, SMALL
    out = tw.attention(q, k, v, backend="cpu").double()
    kept = (out * 128 - 17.0) / SMALL
    assert kept.min() > 80 and kept.max() < 112


def test_the_weights_of_few_keys_have_two_totals() -> None:
    """A weight of 1 and many small ones: those are lost that are added to it."""
    q, k, v = (torch.zeros(1, 1, 128, 16) for _ in range(3))
    q[..., 0], k[..., 1:, 0] = 1.0, -25.0
    _, lse = tw.attention(q, k, v, scale=math.log(2), backend="cpu", return_lse=True)
    kept = lse.double().expm1() * 2**25
    assert kept.min() > 56 and kept.max() < 72


@pytest.mark.parametrize("dim", [128, 256])
def test_gradients_of_the_first_rows_come_from_eight_sums(dim: int) -> None:
    """As in the forward, for scores and for dO·V: what shares a sum with the large product is lost."""
    near = SMALL**0.5
    large = torch.tensor([17.0, *[near] * (dim - 1)]).expand(2, dim).clone()
    large[1, 1:] = 0.0  # the second key has no small products

    def gradients(q0: torch.Tensor, k01: torch.Tensor, v01: torch.Tensor, dout1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, dout = (torch.zeros(1, 1, 40, dim) for _ in range(4))
        q[...], k[0, 0, :2], v[0, 0, :2], dout[0, 0, 1] = q0, k01, v01, dout1
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = tw.attention(*leaves, mask=tw.causal(), scale=math.log(2), backend="cpu")
        return torch.autograd.grad(out, leaves, dout)

    small = torch.tensor([1.0, *[near] * (dim - 1)])
    _, _, dv = gradients(small, large, torch.zeros(2, dim), torch.eye(dim)[0])
    p = dv[0, 0, :2, 0].double()  # the second row's weights
    kept = torch.log2(p[0] / p[1]) / SMALL
    assert abs(kept / dim - 7 / 8) < 1 / 16
    pair = torch.eye(dim)[:1] * torch.tensor([[1.0], [-1.0]])
    dq, _, _ = gradients(torch.zeros(dim), pair, large, small)
    kept = dq[0, 0, 1, 0].double() * 2 / math.log(2) / SMALL  # of half the difference of the two dP
    assert abs(kept / dim - 7 / 8) < 1 / 16


def test_a_query_gradient_of_the_first_rows_is_two_sums_a_block() -> None:
    """One key with a large share and many with small ones: those are lost that share its sum."""
    n, dim = 64, 16
    q, k, v, dout = (torch.zeros(1, 1, n, dim) for _ in range(4))
    signs = torch.tensor([1.0, -1.0]).repeat(n // 2)  # of dP, so that its mean is 0
    v[..., 0], k[..., 1], dout[0, 0, -1, 0] = signs, signs * SMALL, 1.0
    k[0, 0, 0, 1] = 17.0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = tw.attention(*leaves, mask=tw.causal(), scale=1.0, backend="cpu")
    dq = torch.autograd.grad(out, leaves, dout)[0][0, 0, -1, 1].double()
    kept = (dq * n - 17.0) / SMALL
    assert 24 < kept < 40


def test_key_gradients_grow_by_chunks_where_vectors_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """One query with a large share and many with small ones: those are lost that share its chunk of 64."""
    pretend(monkeypatch, "avx512")
    q, k, v, dout = (torch.zeros(1, 1, n, 16) for n in (256, 4, 4, 256))
    dout[...] = SMALL
    dout[..., -1, :] = 17.0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dv = torch.autograd.grad(tw.attention(*leaves, backend="cpu"), leaves, dout)[2].double()
    kept = (dv * 4 - 17.0) / SMALL
    assert kept.min() > 176 and kept.max() < 208


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_bias_of_any_type(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 20, 8, generator=g).to(dtype) for _ in range(4))
    bias = torch.randn(1, 1, 20, 20, generator=g).to(bias_dtype).requires_grad_()
    out = tw.attention(q, k, v, bias=bias, backend="cpu")
    (dbias,) = torch.autograd.grad(out, bias, dout)
    assert dbias.dtype == bias_dtype

    q, k, v, dout, bias = (x.detach().double() for x in (q, k, v, dout, bias))
    exact = tw.attention(q, k, v, bias=bias.requires_grad_(), backend="reference")
    (exact_dbias,) = torch.autograd.grad(exact, bias, dout)
    p = torch.softmax(q @ k.mT / 8**0.5 + bias, -1)
    # 16-bit weights and results are rounded once each; otherwise scores of about 10 are off by the errors of their sums
    slack = (1.1 if dtype == torch.bfloat16 else 16) * torch.finfo(dtype).eps
    assert ((out.double() - exact).abs() <= slack * (p @ v.abs())).all()
    terms = dout.abs() @ v.abs().mT + (dout * exact).abs().sum(-1, keepdim=True)  # of dP - delta
    rounded = torch.finfo(bias_dtype).eps * exact_dbias.abs()
    assert ((dbias.double() - exact_dbias).abs() <= slack * (p * terms).sum(1, keepdim=True) + rounded).all()


def test_a_visible_nan_is_not_swallowed() -> None:
    q, k, v = (torch.randn(1, 1, 20, 8) for _ in range(3))
    k[0, 0, 3, 0] = math.nan
    assert tw.attention(q, k, v, backend="cpu").isnan().all()


@pytest.mark.parametrize("magnitude", [1e3, 1e8, 1e18])
def test_huge_logits(magnitude: float) -> None:
    """Scores far beyond where 2**x is representable: the largest wins, nothing overflows."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 40, 16, generator=g) for _ in range(3))
    out = tw.attention(q * magnitude, k, v, backend="cpu")
    best = (q.double() @ k.double().mT).argmax(-1)
    assert out.isfinite().all()
    if magnitude > 1e6:  # one key takes all
        torch.testing.assert_close(out, v[0, 0][best[0, 0]][None, None])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_errors_are_no_larger_than_torchs(dim: int, causal: bool) -> None:
    """Mean over several draws: a single draw's maximum is chance."""
    ours, theirs = torch.zeros(2), torch.zeros(2)
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 2, 1024, dim, generator=g) for _ in range(3))
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
        for total, out in (
            (ours, tw.attention(q, k, v, mask=tw.causal() if causal else None, backend="cpu")),
            (theirs, F.scaled_dot_product_attention(q, k, v, is_causal=causal)),
        ):
            error = out.double() - exact
            total += torch.tensor([error.norm() / exact.norm(), error.abs().max()])
    assert ours[0] <= theirs[0]
    assert ours[1] <= 1.1 * theirs[1], "the maximum of a few draws still varies by a tenth"


@pytest.mark.parametrize("causal", [False, True])
def test_errors_of_gradients_are_no_larger_than_torchs(causal: bool) -> None:
    ours, theirs = torch.zeros(2, 3), torch.zeros(2, 3)
    mask = tw.causal() if causal else None
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        q, k, v, dout = (torch.randn(1, 8, 512, 64, generator=g) for _ in range(4))

        def gradients(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]  # noqa: B023 - called at once
            return torch.autograd.grad(attend(*leaves), leaves, dout.to(dtype))  # noqa: B023

        def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        exact = gradients(torchs, torch.float64)
        mine = gradients(lambda *x: tw.attention(*x, mask=mask, backend="cpu"), torch.float32)
        for total, grads in ((ours, mine), (theirs, gradients(torchs, torch.float32))):
            errors = [x.double() - y for x, y in zip(grads, exact, strict=True)]
            total[0] += torch.tensor([e.norm() / y.norm() for e, y in zip(errors, exact, strict=True)])
            total[1] += torch.tensor([e.abs().max() for e in errors])
    assert (ours[0] <= theirs[0]).all()
    assert (ours[1] <= 1.1 * theirs[1]).all(), "the maximum of a few draws still varies by a tenth"


def test_strides_of_every_kind() -> None:
    g = torch.Generator().manual_seed(0)
    base = [torch.randn(2, 3, 30, 16, generator=g) for _ in range(3)]
    q, k, v = base
    wanted = F.scaled_dot_product_attention(q, k, v)
    variants = {
        "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "columns apart": lambda x: x.mT.contiguous().mT,
        "every other": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
        "slice": lambda x: torch.cat([x, x], 2)[:, :, :30],
    }
    for name, change in variants.items():
        out = tw.attention(*(change(x) for x in base), backend="cpu")
        torch.testing.assert_close(out, wanted, msg=name)
    expanded = tw.attention(
        q[:1].expand(2, -1, -1, -1), k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), backend="cpu"
    )
    torch.testing.assert_close(expanded[1], wanted[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("factor", [1e-3, 1.0, 3.0, 30.0])
def test_bounded_and_unbounded_keys_mix(factor: float, causal: bool) -> None:
    """Some key blocks are so long that |q| |k| bounds nothing, others are not; rows meet both kinds, in both orders."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 700, 32, generator=g) for _ in range(3))
    k[:, :, 128:256] *= factor
    k[:, :, 300:310] *= -factor
    k[:, :, 512:640] *= 0
    q[:, 1] *= factor
    mask = tw.causal() if causal else None
    out, lse = tw.attention(q, k, v, mask=mask, backend="cpu", return_lse=True)
    exact, exact_lse = tw.attention(q.double(), k.double(), v.double(), mask=mask, backend="reference", return_lse=True)
    scores = (q.double().norm(dim=-1).amax() * k.double().norm(dim=-1).amax() / 32**0.5).item()
    bound = 2 * 32 * torch.finfo(torch.float32).eps * max(1.0, scores)  # a score's error is its weight's relative error
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound * v.abs().max().item())
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=0, atol=bound)


def test_small_and_large_values_keep_their_digits() -> None:
    """A bound far above every score makes all weights tiny: products with tiny or huge values must still be normal numbers."""
    g = torch.Generator().manual_seed(0)
    v = torch.randn(1, 1, 64, 32, generator=g)
    key = torch.randn(1, 1, 1, 32, generator=g)
    key = key / key.norm() * 12
    k = key + 0.1 * torch.randn(1, 1, 64, 32, generator=g)
    q = -key.expand(1, 1, 64, 32)  # every score is the least it can be
    wanted = tw.attention(q.double(), k.double(), v.double(), backend="reference")
    for size in (1e-12, 1.0, 1e30):
        out = tw.attention(q, k, v * size, backend="cpu")
        torch.testing.assert_close(out.double() / size, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bounded_first", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_beside_rows_that_see_bounded_keys(sinks: bool, bounded_first: bool) -> None:
    """Rows whose own keys, before or after, score far below any bound of the bounded ones that only their neighbours see."""
    g = torch.Generator().manual_seed(0)
    q = torch.ones(1, 1, 160, 32)
    k, v = torch.randn(1, 1, 160, 32, generator=g), torch.randn(1, 1, 160, 32, generator=g)
    low = slice(128, None) if bounded_first else slice(128)
    k[:, :, low] = -20 - torch.rand(k[:, :, low].shape, generator=g)
    mask = tw.window(8) & ~tw.window(1)  # the first row sees nothing
    sink = torch.tensor([-150.0]) if sinks else None
    out, lse = tw.attention(q, k, v, mask=mask, sinks=sink, backend="cpu", return_lse=True)
    wanted, wanted_lse = tw.attention(
        q.double(), k.double(), v.double(), mask=mask, sinks=sink, backend="reference", return_lse=True
    )
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dim", [40, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_few_rows(dtype: torch.dtype, dim: int) -> None:
    """Strips as low as the queries are few. Among others a row may be weighed relative to another number, and round otherwise."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 200, dim, generator=g).to(dtype) for heads in (4, 2, 2))
    many, many_lse = tw.attention(q, k, v, mask=tw.causal(), backend="cpu", return_lse=True)
    size = tw.attention(q, k, v.abs(), mask=tw.causal(), backend="cpu").double()
    # 16-bit weights and results are rounded once each, here and there; otherwise a weight's exponent is, and the sums of few
    slack = (2 if dtype == torch.bfloat16 else 4) * torch.finfo(dtype).eps
    for rows in (*range(2, 10), 15, 16, 17, 31, 32, 33, 64):
        few, lse = tw.attention(q[:, :, -rows:], k, v, mask=tw.causal(), backend="cpu", return_lse=True)
        assert ((few.double() - many[:, :, -rows:].double()).abs() <= slack * size[:, :, -rows:]).all(), rows
        torch.testing.assert_close(lse, many_lse[:, :, -rows:], rtol=4 * torch.finfo(lse.dtype).eps, atol=0)
