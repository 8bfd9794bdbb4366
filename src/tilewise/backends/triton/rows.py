"""Launches of the kernels of rows: partial results merged in place, and row sums. One pass over memory each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.backends.gpu.launch import LaunchOptions, interpreting, on_device, view
from tilewise.backends.gpu.record import Launch
from tilewise.backends.triton.partials import Numbers, RowArgs, RowConfig, merge_rows_kernel, row_products_kernel

ROWS, WARPS = 32, 4
"""Of a program."""


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into (out, lse), which are fp32; the other may be rounded."""
    _run(merge_rows_kernel, out, part, lse, part_lse)


def row_products(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dO ∘ O) in fp32; an output of 0 takes no part."""
    sums = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    _run(row_products_kernel, dout, out, sums, None)
    return sums


def _run(kernel: Any, a: Tensor, b: Tensor, a_numbers: Tensor, b_numbers: Tensor | None) -> None:
    launch = row_launch(kernel, a, b, a_numbers, b_numbers)
    if launch.programs:
        on_device(a.device, launch.run)


def row_launch(kernel: Any, a: Tensor, b: Tensor, a_numbers: Tensor, b_numbers: Tensor | None) -> Launch:
    """A program for every ROWS rows of a head."""
    batch, heads, rows, width = a.shape
    own, other = (None if x is None else Numbers(x, *x.stride()) for x in (a_numbers, b_numbers))
    assert own is not None
    args = RowArgs(view(a), view(b), own, other, rows, heads)
    config = RowConfig(DV=width, BLOCK_DV=max(16, 1 << (width - 1).bit_length()), BLOCK_M=ROWS, INTERPRET=interpreting())
    programs = -(-rows // ROWS) * heads * batch
    return Launch(kernel, programs, (args,), config, LaunchOptions(num_warps=WARPS))
