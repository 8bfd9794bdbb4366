"""Partial attentions over disjoint keys are one."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_parts_of_the_keys(layout: str) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 40, 16, generator=g, dtype=torch.float64) for _ in range(3))
    axis = 2 if layout == "bhsd" else 1
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    whole, lse = tw.attention(q, k, v, layout=layout, return_lse=True)  # type: ignore[call-overload]
    parts = [
        tw.attention(q, x, y, layout=layout, return_lse=True)  # type: ignore[call-overload]
        for x, y in zip(k.split((7, 30, 3), axis), v.split((7, 30, 3), axis), strict=True)
    ]
    out, total = tw.merge(*parts, layout=layout)
    assert torch.allclose(out, whole, atol=1e-14) and torch.allclose(total, lse, atol=1e-14)
    if layout == "bshd":
        dout = torch.randn(out.shape, generator=g, dtype=torch.float64)
        for got, want in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, whole)), strict=True):
            assert torch.allclose(got, want, atol=1e-13)


def test_packed_parts_and_dtypes() -> None:
    cu = torch.tensor([0, 3, 8])
    q, k, v = (torch.randn(8, 2, 16).bfloat16() for _ in range(3))
    part = tw.attention_varlen(q, k, v, cu, cu, return_lse=True)
    nothing = torch.zeros_like(part[0]), torch.full_like(part[1], float("-inf"))
    out, lse = tw.merge(part, nothing)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, part[0]) and torch.allclose(lse, part[1])


def test_what_is_refused() -> None:
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    with pytest.raises(ArgumentError, match="at least one pair"):
        tw.merge()
    with pytest.raises(ArgumentTypeError, match="part 1: need a pair"):
        tw.merge((out, lse), (out,))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="part 1: out is"):
        tw.merge((out, lse), (out[:, :1], lse))
    with pytest.raises(LayoutError, match="part 0: lse has shape"):
        tw.merge((out, lse[:, :1]))
    with pytest.raises(LayoutError, match="layout: got 'sbhd'"):
        tw.merge((out, lse), layout="sbhd")
    with pytest.raises(LayoutError, match="out: rank 2"):
        tw.merge((out[0, 0], lse[0, 0, 0]))
