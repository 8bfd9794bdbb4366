"""fp32 operands split for the 16-bit tensor cores: a pass over memory, so that the kernels that stream them need not."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.structs import Head
from tilewise.backends.gpu.tile import base, fp16_split, load_rows, row_block, split_scales, store_rows


@triton.jit
def fp16_split_kernel(s, C: tl.constexpr):
    """BLOCK_M tokens of one head, as two parts of fp16 and a scale for each token."""
    rows, ok, row, h, zero = row_block(s.length, s.heads, C.BLOCK_M)
    parts = fp16_split(load_rows(Head(s.x, None, row, h, zero), rows, ok, C.D, C.BLOCK_D))  # [M, D]
    for i in tl.static_range(2):
        at = base(Head(s.parts, None, row + i * s.rows, h, zero))
        store_rows(at, s.parts, rows, ok, parts[i], C.D, C.BLOCK_D, C)
    tl.store(split_scales(Head(s.parts, None, row, h, zero), s.rows) + rows, parts[2], mask=ok)
