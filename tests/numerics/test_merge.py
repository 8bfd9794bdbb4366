"""The merge is an associative, commutative operation with a unit, and equals attention over all the keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilewise.numerics.merge import join_sink, merge, merge_many

Partial = tuple[Tensor, Tensor]
EPS = torch.finfo(torch.float64).eps


def attend(scores: Tensor, values: Tensor) -> Partial:
    """scores [M, N], -inf where masked; values [N, Dv]."""
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:1], float("-inf"))
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[:, None])
    return weights @ values, lse


@st.composite
def splits(draw: st.DrawFn, parts: int) -> tuple[list[Partial], Partial, float]:
    """Partial attentions over disjoint keys, the attention over all, and the size of the values."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=parts, max_size=parts))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows, n = 4, sum(sizes)
    spread = draw(st.sampled_from([0.1, 1.0, 30.0, 1000.0]))
    scores = spread * torch.randn(rows, n, generator=generator, dtype=torch.float64)
    scores = scores.masked_fill(
        torch.rand(rows, n, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0])), -torch.inf
    )
    values = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    partial = [attend(s, v) for s, v in zip(scores.split(sizes, 1), values.split(sizes, 0), strict=True)]
    return partial, attend(scores, values), spread


def assert_same(a: Partial, b: Partial, spread: float) -> None:
    """Weights are exp(lse - lse'), so an lse of size s costs s·eps relative; each merge adds a few roundings."""
    tolerance = 64 * EPS * (1 + 8 * spread)
    assert not a[0].isnan().any() and not a[1].isnan().any()
    torch.testing.assert_close(a[0], b[0], rtol=tolerance, atol=4 * tolerance)  # |values| are below 4 or so
    torch.testing.assert_close(a[1], b[1], rtol=tolerance, atol=tolerance)


@given(splits(3))
@settings(max_examples=60, deadline=None)
def test_associative_and_commutative(case: tuple[list[Partial], Partial, float]) -> None:
    (a, b, c), whole, spread = case
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)), spread)
    assert_same(merge(a, b), merge(b, a), spread)
    assert_same(merge(merge(a, b), c), whole, spread)


@given(splits(1))
@settings(max_examples=30, deadline=None)
def test_unit(case: tuple[list[Partial], Partial, float]) -> None:
    (a,), _, _ = case
    unit = torch.zeros_like(a[0]), torch.full_like(a[1], float("-inf"))
    for merged in (merge(a, unit), merge(unit, a)):
        assert torch.equal(merged[0], a[0]) and torch.equal(merged[1], a[1])


@given(splits(5))
@settings(max_examples=40, deadline=None)
def test_many_equals_attention_over_all_keys(case: tuple[list[Partial], Partial, float]) -> None:
    partial, whole, spread = case
    outs, lses = [part[0] for part in partial], [part[1] for part in partial]
    assert_same(merge_many(outs, lses), whole, spread)
    assert_same(merge_many(torch.stack(outs), torch.stack(lses)), whole, spread)


def test_no_parts_at_all() -> None:
    out, lse = merge_many(torch.zeros(0, 4, 3), torch.zeros(0, 4))
    assert torch.equal(out, torch.zeros(4, 3)) and torch.equal(lse, torch.full((4,), float("-inf")))


@given(splits(1), st.sampled_from([-torch.inf, -50.0, 0.0, 3.0, 900.0]))
@settings(max_examples=40, deadline=None)
def test_sink_is_a_key_of_value_zero(case: tuple[list[Partial], Partial, float], sink: float) -> None:
    (part,), _, spread = case
    key = torch.zeros_like(part[0]), torch.full_like(part[1], sink)
    joined = join_sink(part[0][None], part[1][None], torch.tensor([sink], dtype=torch.float64))
    assert_same((joined[0][0], joined[1][0]), merge(part, key), spread + abs(max(sink, -50.0)))


@pytest.mark.parametrize(
    ("parts", "result"),
    [
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float16, torch.float16), torch.float32),
        ((torch.float64, torch.float64), torch.float64),
    ],
)
def test_computes_in_fp32_at_least(parts: tuple[torch.dtype, torch.dtype], result: torch.dtype) -> None:
    part = torch.ones(2, 3, dtype=parts[0]), torch.zeros(2, dtype=parts[1])
    for out, lse in (merge(part, part), join_sink(part[0][None], part[1][None], torch.zeros(1))):
        assert out.dtype == lse.dtype == result


def test_gradients_of_empty_rows_are_zero() -> None:
    out = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    lse = torch.tensor([[0.0, -torch.inf, -torch.inf], [1.0, 2.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    merged = merge((out[0], lse[0]), (out[1], lse[1]))
    merged[0].sum().backward()
    assert out.grad is not None and lse.grad is not None
    assert out.grad.isfinite().all() and lse.grad.isfinite().all()
    assert (out.grad[:, 2] == 0).all() and (lse.grad[:, 2] == 0).all()
