"""fp32 numbers as two fp16 parts with a scale, in Triton's interpreter; a program of its own, as `interpreted.py` is.

TRITON_INTERPRET=1 python -m tests.backends.fp16_split
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from tilewise.backends.gpu.arguments import empty_fp16_split
from tilewise.backends.gpu.structs import KernelConfig
from tilewise.backends.gpu.tile import dot, fp16_split, fp16_split_weights, per_row, product
from tilewise.backends.triton.run import spec_of, splitting
from tilewise.model.tile import TilePlan

SIDE = 16
U = 2.0**-24
SPLIT_ERROR = 4 * U
"""Of a number in two parts, relative: each is rounded to 11 bits."""


@triton.jit
def products_kernel(x_ptr, y_ptr, xyt_ptr, xy_ptr, cut_ptr, C: tl.constexpr):
    at = tl.arange(0, C.D)[:, None] * C.D + tl.arange(0, C.D)[None, :]
    x = tl.load(x_ptr + at)
    y = fp16_split(tl.load(y_ptr + at))
    xyt, factors = product(fp16_split(x), y, C)
    tl.store(xyt_ptr + at, xyt * per_row(factors, C))
    tl.store(xy_ptr + at, dot(x, y, tl.zeros([C.D, C.D], tl.float32), C))
    cut = fp16_split_weights(x)
    tl.store(cut_ptr + at, (cut[0].to(tl.float32) + cut[1].to(tl.float32)) * cut[2][:, None])


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts (2, B, H, S, D) and scales (B, H, S) of a tensor in fp64."""
    b, h, s, _ = x.shape
    parts = empty_fp16_split(x)
    splitting(x, parts, TilePlan(32, 1, 1, 4, pass_="fp16_split"), spec_of(x.device)).run()
    scales = torch.empty(0, dtype=torch.float32).set_(parts.untyped_storage())[-b * h * s :]
    return parts.unflatten(0, (2, b)).double(), scales.view(b, h, s).double()


def check_split() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 3, 37, 20), generator=generator) * torch.logspace(-25, 25, 37)[:, None]
    parts, scales = split(x.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(scales.log2().round(), scales.log2()), "powers of two"
    error = (parts.sum(0) * scales[..., None] - x.double()).abs()
    # small numbers beside large ones: fp16 ends at 2⁻²⁵, the largest of a token lies above 2⁶
    assert (error <= SPLIT_ERROR * x.abs() + 2.0**-31 * x.abs().amax(-1, keepdim=True)).all()
    assert (parts[1].abs() <= 2.0**-11 * parts[0].abs() + 2.0**-25).all()


def check_special() -> None:
    most, least = torch.finfo(torch.float32).max, 2.0**-149
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, most, -most, least])
    parts, scales = split(special.view(1, 1, 8, 1))
    parts = parts.flatten(1)
    whole = parts.sum(0) * scales.flatten()
    assert torch.equal(whole[:4], special[:4].double()) and whole[4].isnan()
    assert torch.equal(parts[1, :4], torch.zeros(4, dtype=torch.float64))
    assert ((whole[5:] / special[5:].double() - 1).abs() <= SPLIT_ERROR).all(), "the largest and the smallest"
    # an infinity leaves its neighbours alone
    parts, scales = split(torch.tensor([torch.inf, 1.0, torch.nan, -3.0]).view(1, 1, 1, 4))
    assert torch.equal(
        (parts.sum(0) * scales[..., None]).flatten()[[0, 1, 3]], torch.tensor([torch.inf, 1.0, -3.0]).double()
    )


def check_products() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn((SIDE, SIDE), generator=generator) for _ in range(2))
    # a huge token that the first rows do not see must not cost them a bit
    y[5] *= 1e30
    x[:8, 5] = 0.0
    x[8:] *= 1e-20
    found = [torch.empty(SIDE, SIDE) for _ in range(3)]
    products_kernel[(1,)](x, y, *found, KernelConfig(D=SIDE, FP16_SPLIT=True, INTERPRET=True))
    for got, other in zip(found, (y.T, y), strict=False):
        want, size = x.double() @ other.double(), x.double().abs() @ other.double().abs()
        # two operands split, the product of their low parts left out, and fp32 sums of 16 numbers, three times; one more
        # product left out would be 2⁻¹² of the size off
        error = float(((got.double() - want).abs() / size).max())
        assert error < 3 * SPLIT_ERROR + 16 * U, error
    assert ((found[2] - x).abs() <= SPLIT_ERROR * x.abs() + 2.0**-38 * x.abs().amax(1, keepdim=True)).all()


if __name__ == "__main__":
    check_split()
    check_special()
    check_products()
    print("ok")
