"""Compensated sums get right what plain fp32 gets wrong."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilewise.numerics.summation import Compensated, two_product, two_sum

U32 = 2.0**-24


def exact(x: Tensor) -> Fraction:
    return sum((Fraction(value) for value in x.double().flatten().tolist()), Fraction(0))


floats32 = st.floats(-(2.0**40), 2.0**40, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-40)


@given(floats32, floats32, st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=100, deadline=None)
def test_error_free_transformations(a: float, b: float, dtype: torch.dtype) -> None:
    x, y = torch.tensor(a, dtype=dtype) / 3, torch.tensor(b, dtype=dtype) / 7
    s, e = two_sum(x, y)
    assert exact(s) + exact(e) == exact(x) + exact(y)
    p, e = two_product(x, y)
    assert exact(p) + exact(e) == exact(x) * exact(y)


def running(terms: list[Tensor]) -> Tensor:
    total = Compensated(torch.zeros_like(terms[0]))
    for term in terms:
        total.add(term)
    return total.total()


HARD = {
    "cancellation": torch.tensor([1e8, 1.0, -1e8, 1.0]),
    "lost in a large first term": torch.tensor([2.0**24] + [1.0] * 1000),
    "the same small term, often": torch.full((8_000,), 0.1),
    "a large term in the middle": torch.tensor([1.0] * 100 + [2.0**30] + [-1.0] * 50 + [-(2.0**30)]),
}


@pytest.mark.parametrize("name", HARD)
def test_sums_plain_fp32_gets_wrong(name: str) -> None:
    x = HARD[name]
    right = float(exact(x))
    plain = torch.tensor(0.0)
    for term in x:
        plain = plain + term
    allowed = U32 * abs(right) + len(x) ** 2 * U32**2 * float(x.abs().double().sum())
    assert abs(float(plain) - right) > allowed
    assert abs(float(running(list(x))) - right) <= allowed


def test_rescaled_accumulation() -> None:
    """o ← α·o + x, as online softmax does it: the carry is rescaled with the sum."""
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(3000, 8, generator=generator)
    factors = 1 - 0.01 * torch.rand(3000, 8, generator=generator)
    plain, right = torch.zeros(8), torch.zeros(8, dtype=torch.float64)
    magnitude = torch.zeros(8, dtype=torch.float64)
    total = Compensated(torch.zeros(8))
    for term, factor in zip(terms, factors, strict=True):
        plain = plain * factor + term
        right = right * factor.double() + term.double()
        magnitude = magnitude * factor.double() + term.double().abs()
        total.scale(factor)
        total.add(term)
    allowed = U32 * right.abs() + 4 * 3000 * U32**2 * magnitude
    assert ((total.total() - right).abs() <= allowed).all()
    assert ((plain - right).abs() > 2 * allowed).any()


def test_scale_broadcasts() -> None:
    total = Compensated(torch.zeros(2, 3))
    total.add(torch.ones(2, 3))
    total.scale(torch.tensor([[2.0], [0.0]]))
    assert total.total().tolist() == [[2, 2, 2], [0, 0, 0]]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_terms_stay_what_they_are(value: float) -> None:
    x = torch.tensor([1.0, value, 2.0])
    torch.testing.assert_close(running(list(x)), torch.tensor(value), equal_nan=True)
