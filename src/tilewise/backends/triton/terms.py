"""fp32 operands split for the 16-bit tensor cores: a pass over memory, so that the kernels that stream them need not."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.tile import base, in_terms, load_rows, scales_behind, store_rows


@triton.jit
def terms_kernel(s, C: tl.constexpr):
    """BLOCK_M tokens of one head, as two terms of fp16 and a scale for each token."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(s.length, C.BLOCK_M)
    rows = pid % tiles * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    h = pid // tiles % s.heads
    row = pid // tiles // s.heads
    ok = rows < s.length
    nothing = pid * 0
    x_tile = load_rows(base(s.x, row, h, nothing), s.x.stride_s, s.x.stride_d, rows, ok, C.D, C.BLOCK_D)  # [M, D]
    terms = in_terms(x_tile)
    for i in tl.static_range(2):
        at = base(s.terms, row + i * s.rows, h, nothing)
        store_rows(at, s.terms.stride_s, s.terms.stride_d, rows, ok, terms[i], C.D, C.BLOCK_D, C)
    tl.store(scales_behind(s.terms, s.rows, row, h) + rows, terms[2], mask=ok)
