"""The roundings of an implementation of attention: what the error bounds charge for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.problem import Problem

LAMBDA = 7.0
"""Of the probabilistic bound λ√n·u for a sum: it fails with probability 2·exp(−λ²/2) = 5·10⁻¹¹ at most."""


@dataclass(frozen=True)
class Arithmetic:
    """`of` gives the least accurate arithmetic that is still correct; a stricter test may `replace` a field."""

    u: float  # unit roundoff of sums and of everything elementwise
    weight: float  # of P and dS, rounded to the inputs' dtype before a product
    operand: float  # of both operands of each product (tf32)
    store: float  # of out, dq, dk, dv
    p_floor: float  # absolute errors where a number is too small to be normal: of P in the dtype of sums,
    weight_floor: float  # of P and dS as operands, of results
    store_floor: float
    stored_out: bool = True  # δ is taken from out as it is stored
    oracle_factor: float = 1.0  # 2 where the oracle is no more accurate than what it measures

    @classmethod
    def of(cls, problem: Problem) -> Arithmetic:
        store: torch.dtype = getattr(torch, problem.dtype)
        work: torch.dtype = getattr(torch, problem.arithmetic)
        half, wide = problem.itemsize == 2 and not problem.widened, problem.widened
        return cls(
            u=unit_roundoff(work) * (2 if wide else 1),  # the oracle errs by as much, but rounds no result
            weight=unit_roundoff(store) if half else 0.0,
            operand=2.0**-10 if problem.precision == "tf32" and problem.dtype == "float32" else 0.0,
            store=unit_roundoff(store),
            p_floor=floor(work),
            weight_floor=floor(work if wide else store),
            store_floor=floor(store),
            stored_out=not wide,
            oracle_factor=2.0 if problem.dtype == "float64" else 1.0,
        )


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def floor(dtype: torch.dtype) -> float:
    """The absolute error near 0: half a subnormal step in fp16; the wider exponents may flush subnormals to 0."""
    info = torch.finfo(dtype)
    return info.smallest_normal * unit_roundoff(dtype) if dtype == torch.float16 else info.smallest_normal


def growth(n: Tensor | float) -> Tensor:
    """g(n) = min(n, λ√n): the roundings that a sum of n terms is charged for."""
    terms = torch.as_tensor(n, dtype=torch.float64, device=n.device if isinstance(n, Tensor) else "cpu")
    return torch.minimum(terms, LAMBDA * terms.sqrt())
