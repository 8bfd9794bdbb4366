"""Merging the partial results of split-KV: the same merge as everywhere, with unit (0, -inf), and the sink once at the end."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tilewise.backends.gpu.merge import add_in_order, add_parts, add_sink, normalized
from tilewise.backends.gpu.structs import Head, View
from tilewise.backends.gpu.tile import base, batch_rows, row_block, rows_at, store_rows
from tilewise.backends.triton import fixed

TOGETHER = tl.constexpr(fixed.TOGETHER)


@triton.jit
def parts_with_keys(a, at, C: tl.constexpr):
    """The first part of a row that has keys, and the one after the last; `at`: the LSE of part 0."""
    start, past = a.splits, a.splits * 0
    for first in range(0, a.splits, 256):
        part = first + tl.arange(0, 256)
        lses = tl.load(
            at + part.to(tl.int64) * batch_rows(a, C) * a.heads * a.len_q, mask=part < a.splits, other=float("-inf")
        )
        start = tl.minimum(start, tl.min(tl.where(lses != float("-inf"), part, a.splits), 0))
        past = tl.maximum(past, tl.max(tl.where(lses != float("-inf"), part + 1, 0), 0))
    return start, past


@triton.jit
def merge_kernel(a, part_out, part_lse_ptr, C: tl.constexpr):
    """BLOCK_DV columns of a row of one head: out = Σ exp(lse_i - lse) out_i. Parts lie one after another along the batch. BLOCK_N
    at a time; where the bits count, one after the other, from the first that has keys to the last."""
    if C.EARLY:
        gdc_wait()
    PIECES: tl.constexpr = (C.DV + C.BLOCK_DV - 1) // C.BLOCK_DV
    WIDTH: tl.constexpr = C.DV if PIECES == 1 else C.BLOCK_DV  # pieces are equal
    rows, ok, row, h, zero = row_block(a.len_q, a.heads, C.BLOCK_M, PIECES)  # one row
    column = tl.program_id(0) % PIECES * C.BLOCK_DV
    acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([C.BLOCK_M], 0.0, tl.float32)
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    if C.SPAN > 0:
        start, past = parts_with_keys(a, part_lse_ptr + (row.to(tl.int64) * a.heads + h) * a.len_q + tl.sum(rows, 0), C)
        for i in tl.range(start, past, TOGETHER, num_stages=3):
            for j in tl.static_range(TOGETHER):
                part = row + tl.minimum(i + j, a.splits - 1) * batch_rows(a, C)
                lse = tl.load(part_lse_ptr + (part.to(tl.int64) * a.heads + h) * a.len_q + rows)
                lse = tl.where(i + j < past, lse, float("-inf"))
                at = base(Head(part_out, None, part, h, zero)) + column * part_out.stride_d
                part_tile = rows_at(at, part_out, rows, ok, WIDTH, C.BLOCK_DV)  # [M, DV]
                part_tile = tl.where((lse != float("-inf"))[:, None], part_tile, 0.0)  # else nobody has written it
                acc, l, m = add_in_order(acc, l, m, part_tile, lse)
    else:
        only, view = tl.sum(rows, 0), part_out
        by_part = View(view.ptr, view.stride_b, view.stride_h, view.stride_b, view.stride_d)  # [parts, DV]
        for first in range(0, a.splits, C.BLOCK_N):
            part = first + tl.arange(0, C.BLOCK_N)
            there = part < a.splits
            part = (row + part * batch_rows(a, C)).to(tl.int64)
            lses = tl.load(part_lse_ptr + (part * a.heads + h) * a.len_q + only, mask=there, other=float("-inf"))
            at = base(Head(view, None, zero, h, only)) + column * view.stride_d
            outs = rows_at(at, by_part, part, there, WIDTH, C.BLOCK_DV)
            acc, l, m = add_parts(acc, l, m, outs, lses)
    if a.sinks_ptr is not None:
        acc, l, m = add_sink(acc, l, m, tl.load(a.sinks_ptr + h).to(tl.float32))
    out_tile, lse = normalized(acc, l, m)
    at = base(Head(a.out, None, row, h, zero)) + column * a.out.stride_d
    store_rows(at, a.out, rows, ok, out_tile, WIDTH, C.BLOCK_DV, C)
    tl.store(a.lse_ptr + (row.to(tl.int64) * a.heads + h) * a.len_q + rows, lse, mask=ok & (column == 0))
