"""fp32 numbers as three terms of bf16, in Triton's interpreter; a program of its own, as `interpreted.py` is.

TRITON_INTERPRET=1 python -m tests.backends.split_terms
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from tilewise.backends.gpu.arguments import empty_terms
from tilewise.backends.gpu.structs import Config
from tilewise.backends.gpu.tile import cut_in_terms, dot, in_terms, product
from tilewise.backends.triton.run import splitting

SIDE = 16
U = 2.0**-24


@triton.jit
def products_kernel(x_ptr, y_ptr, xyt_ptr, xy_ptr, cut_ptr, C: tl.constexpr):
    at = tl.arange(0, C.D)[:, None] * C.D + tl.arange(0, C.D)[None, :]
    x = tl.load(x_ptr + at)
    y = in_terms(tl.load(y_ptr + at), C)
    tl.store(xyt_ptr + at, product(in_terms(x, C), y, C))
    tl.store(xy_ptr + at, dot(x, y, tl.zeros([C.D, C.D], tl.float32), C))
    cut = cut_in_terms(x, C)
    tl.store(cut_ptr + at, cut[0].to(tl.float32) + cut[1].to(tl.float32) + cut[2].to(tl.float32))


def split(x: torch.Tensor) -> torch.Tensor:
    """The terms of a tensor (B, H, S, D): (3, B, H, S, D) in fp64."""
    terms = empty_terms(x)
    splitting(x, terms).run()
    return terms.unflatten(0, (3, x.shape[0])).double()


def check_split() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 3, 37, 20), generator=generator) * torch.logspace(-20, 20, 20)
    terms = split(x.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(terms.sum(0), x.double()), "three terms hold every bit"
    assert (terms[1].abs() <= 2.0**-8 * x.abs()).all() and (terms[2].abs() <= 2.0**-16 * x.abs()).all()


def check_special() -> None:
    most = torch.finfo(torch.float32).max
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, most, -most, 1.0])
    terms = split(special.view(1, 1, 1, 8)).flatten(1)
    whole = terms.sum(0)
    assert torch.equal(whole[:4], special[:4].double()) and whole[4].isnan() and whole[7] == 1
    assert ((whole[5:7] / special[5:7].double() - 1).abs() < 2.0**-8).all(), "finite stays finite"
    assert (terms[1:, [0, 1, 2, 3]] == 0).all()


def check_products() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn((SIDE, SIDE), generator=generator) for _ in range(2))
    found = [torch.empty(SIDE, SIDE) for _ in range(3)]
    products_kernel[(1,)](x, y, *found, Config(D=SIDE, TERMS=3, INTERPRET=True))
    for got, other in zip(found, (y.T, y), strict=False):
        want, size = x.double() @ other.double(), x.double().abs() @ other.double().abs()
        # fp32 sums of 16 numbers, six times; one product of second terms left out would be 2⁻¹⁷ of the size off
        error = float(((got.double() - want).abs() / size).max())
        assert error < 16 * U, error
    assert torch.equal(found[2], x), "cutting loses nothing either"


if __name__ == "__main__":
    check_split()
    check_special()
    check_products()
    print("ok")
