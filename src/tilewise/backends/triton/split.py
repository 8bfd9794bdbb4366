"""Merging the partial results of split-KV: the same merge as everywhere, with unit (0, -inf), and the sink once at the end."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.merge import add_in_order, add_part, add_sink, normalized
from tilewise.backends.gpu.structs import Head
from tilewise.backends.gpu.tile import base, batch_rows, load_rows, row_block, store_rows


@triton.jit
def merge_kernel(a, part_out, part_lse_ptr, C: tl.constexpr):
    """BLOCK_M rows of one head: out = Σ exp(lse_i - lse) out_i. Parts lie one after another along the batch."""
    rows, ok, row, h, zero = row_block(a.len_q, a.heads, C.BLOCK_M)
    acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([C.BLOCK_M], 0.0, tl.float32)
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    for i in range(a.splits):
        part = row + i * batch_rows(a, C)
        at = part_lse_ptr + (part.to(tl.int64) * a.heads + h) * a.len_q + rows
        lse = tl.load(at, mask=ok, other=float("-inf"))
        part_tile = load_rows(Head(part_out, None, part, h, zero), rows, ok, C.DV, C.BLOCK_DV)  # [M, DV]
        if C.SPAN > 0:
            acc, l, m = add_in_order(acc, l, m, part_tile, lse)
        else:
            acc, l, m = add_part(acc, l, m, part_tile, lse)
    if a.sinks_ptr is not None:
        acc, l, m = add_sink(acc, l, m, tl.load(a.sinks_ptr + h).to(tl.float32))
    out_tile, lse = normalized(acc, l, m)
    store_rows(base(Head(a.out, None, row, h, zero)), a.out, rows, ok, out_tile, C.DV, C.BLOCK_DV, C)
    tl.store(a.lse_ptr + (row.to(tl.int64) * a.heads + h) * a.len_q + rows, lse, mask=ok)
