"""What the kernels of rows must compute, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends import base
from tilewise.backends.triton import rows
from tilewise.numerics.merge import merge

NEG_INF = float("-inf")


def matrices(device: torch.device, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    """Two (2, 3, 45, width), views with gaps in the rows."""
    g = torch.Generator().manual_seed(width)
    a, b = torch.randn((2, 2, 3, 50, width), generator=g)
    return a[:, :, 5:].to(device), b.to(device, dtype)[:, :, 2:47]


def check_merge(device: torch.device) -> None:
    for dtype, width in ((torch.float32, 64), (torch.bfloat16, 128), (torch.float16, 40)):
        out, part = matrices(device, dtype, width)
        lse, other = 3 * torch.randn((2, 2, 3, 45), generator=torch.Generator().manual_seed(1)).to(device)
        lse[:, 0], other[:, 1] = NEG_INF, NEG_INF
        lse[:, :, 7] = other[:, :, 7] = NEG_INF
        out[lse == NEG_INF] = 0.0
        part[other == NEG_INF] = 0.0
        want, total = merge((out.double(), lse.double()), (part.double(), other.double()))
        rows.merge_rows(out, lse, part, other)
        eps = torch.finfo(torch.float32).eps
        assert (out - want).abs().max() <= 16 * eps * want.abs().max(), (dtype, (out - want).abs().max())
        seen = total > NEG_INF
        assert torch.equal(lse > NEG_INF, seen) and (lse - total)[seen].abs().max() <= 16 * eps * total[seen].abs().max()


def check_products(device: torch.device) -> None:
    for dtype, width in ((torch.float32, 64), (torch.bfloat16, 128)):
        dout, out = matrices(device, dtype, width)
        dout = dout.to(dtype)
        dout[0, 0, 3, 4], out[0, 0, 3, 4] = float("inf"), 0.0
        want = base.row_products(dout, out, torch.float64)
        found = rows.row_products(dout, out)
        limit = width * torch.finfo(torch.float32).eps * base.row_products(dout.abs(), out.abs(), torch.float64)
        assert found.dtype == torch.float32 and ((found - want).abs() <= limit).all()
