"""Merging the partial results of split-KV: the same merge as everywhere, with unit (0, -inf), and the sink once at the end."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.merge import add_in_order, add_parts, add_sink, normalized
from tilewise.backends.gpu.structs import Head, View
from tilewise.backends.gpu.tile import base, batch_rows, load_rows, row_block, rows_at, store_rows


@triton.jit
def merge_kernel(a, part_out, part_lse_ptr, C: tl.constexpr):
    """A row of one head: out = Σ exp(lse_i - lse) out_i. Parts lie one after another along the batch. BLOCK_N at a time;
    where the bits count, one after the other."""
    rows, ok, row, h, zero = row_block(a.len_q, a.heads, C.BLOCK_M)  # one row
    acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([C.BLOCK_M], 0.0, tl.float32)
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    if C.SPAN > 0:
        for i in tl.range(a.splits, num_stages=4):
            part = row + i * batch_rows(a, C)
            lse = tl.load(part_lse_ptr + (part.to(tl.int64) * a.heads + h) * a.len_q + rows)
            part_tile = load_rows(Head(part_out, None, part, h, zero), rows, ok, C.DV, C.BLOCK_DV)  # [M, DV]
            acc, l, m = add_in_order(acc, l, m, part_tile, lse)
    else:
        only, view = tl.sum(rows, 0), part_out
        by_part = View(view.ptr, view.stride_b, view.stride_h, view.stride_b, view.stride_d)  # [parts, DV]
        for first in range(0, a.splits, C.BLOCK_N):
            part = first + tl.arange(0, C.BLOCK_N)
            there = part < a.splits
            part = (row + part * batch_rows(a, C)).to(tl.int64)
            lses = tl.load(part_lse_ptr + (part * a.heads + h) * a.len_q + only, mask=there, other=float("-inf"))
            outs = rows_at(base(Head(view, None, zero, h, only)), by_part, part, there, C.DV, C.BLOCK_DV)
            acc, l, m = add_parts(acc, l, m, outs, lses)
    if a.sinks_ptr is not None:
        acc, l, m = add_sink(acc, l, m, tl.load(a.sinks_ptr + h).to(tl.float32))
    out_tile, lse = normalized(acc, l, m)
    store_rows(base(Head(a.out, None, row, h, zero)), a.out, rows, ok, out_tile, C.DV, C.BLOCK_DV, C)
    tl.store(a.lse_ptr + (row.to(tl.int64) * a.heads + h) * a.len_q + rows, lse, mask=ok)
