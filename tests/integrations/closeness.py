"""How far two float64 computations of the same attention may be apart."""

from __future__ import annotations

import torch
from torch import Tensor

U = 2.0**-53


def apart(actual: Tensor, expected: Tensor, q: Tensor, k: Tensor, v: Tensor, cotangent: float = 0.0) -> float:
    """max |actual − expected| over what rounding allows: more than 1 is a difference in meaning.

    A score is a sum of D terms of size at most Z = max|q|·max|k|·D in total, a row a sum of N weighted values; each of the two
    computations errs by at most (D + N + 16)·u of the sums of magnitudes, which an error of a score multiplies by 1 + Z.
    A gradient (`cotangent`, the largest |dout|) sums M rows of such products once more.
    """
    assert actual.shape == expected.shape
    q, k, v = q.detach(), k.detach(), v.detach()
    dim, keys = q.shape[-1], k.shape[-2]
    z = float(q.abs().max() * k.abs().max()) * dim
    size = float(v.abs().max()) + float(expected.detach().abs().max())
    if cotangent:
        size *= cotangent * v.shape[-1] * max(float(q.abs().max()), float(k.abs().max()), 1.0) * q.shape[-2]
    bound = 2 * (dim + keys + 16) * U * size * (1 + z)
    error = float((actual.detach() - expected.detach()).abs().max()) if actual.numel() else 0.0
    return error / bound


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
