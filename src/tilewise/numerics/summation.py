"""Compensated summation: what each addition rounds away is kept and added at the end.

A compensated sum of n terms in unit roundoff u errs by about u·|Σx| + n·u²·Σ|x|, where plain summation errs by up to
n·u·Σ|x| (Kahan 1965; Neumaier 1974; Ogita, Rump and Oishi 2005).
"""

from __future__ import annotations

import torch
from torch import Tensor


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """s = fl(a + b) and e with a + b = s + e exactly (Knuth); no order of magnitudes is assumed."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


def two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """p = fl(a·b) and e with a·b = p + e exactly, barring underflow."""
    p = a * b
    if p.dtype != torch.float64:
        return p, (a.double() * b.double() - p.double()).to(p.dtype)  # 24 + 24 bits fit in the 53 of fp64
    a_hi, a_lo = _split(a)
    b_hi, b_lo = _split(b)
    return p, a_lo * b_lo - (((p - a_hi * b_hi) - a_lo * b_hi) - a_hi * b_lo)


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    """A double as the sum of two with at most 26 bits each (Dekker 1971)."""
    scaled = a * (2.0**27 + 1.0)
    hi = scaled - (scaled - a)
    return hi, a - hi


STEPS = 4
"""Terms of the plain sums that a compensated product is made of."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as a compensated sum of short products."""
    pairs = list(zip(a.split(STEPS, dim=-1), b.split(STEPS, dim=-2), strict=True))
    total = Compensated(pairs[0][0] @ pairs[0][1])
    for left, right in pairs[1:]:
        total.add(left @ right)
    return total.total()


def ordered_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by operations on single elements, summed in order: an element follows from its row and its column alone, and a step
    that multiplies by 0 changes nothing."""
    total = a[..., :, :1] * b[..., :1, :]
    for n in range(1, a.shape[-1]):
        total = total + a[..., :, n : n + 1] * b[..., n : n + 1, :]
    return total.contiguous()


class Compensated:
    """A running sum `value + carry`; `carry` holds what rounding took from `value`."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.carry = value, torch.zeros_like(value)

    def add(self, x: Tensor) -> None:
        self.value, lost = two_sum(self.value, x)
        self.carry = self.carry + lost

    def scale(self, factor: Tensor) -> None:
        """Multiply the sum by `factor`, which may broadcast."""
        self.value, lost = two_product(self.value, factor)
        self.carry = self.carry * factor + lost

    def total(self) -> Tensor:
        """The sum, rounded once. An overflowed sum stays the infinity it is, though its carry is inf − inf."""
        return torch.where(self.value.isfinite(), self.value + self.carry, self.value)
