"""Merging the partial results of split-KV: the same merge as everywhere, with unit (0, -inf), and the sink once at the end."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.merge import joined, merged, with_sink
from tilewise.backends.gpu.tile import base, load_rows, store_rows


@triton.jit
def merge_kernel(a, part_out, part_lse_ptr, C: tl.constexpr):
    """BLOCK_M rows of one head: out = Σ exp(lse_i - lse) out_i. Parts lie one after another along the batch."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(a.len_q, C.BLOCK_M)
    rows = pid % tiles * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    h = pid // tiles % a.heads
    row = pid // tiles // a.heads
    ok = rows < a.len_q
    nothing = pid * 0
    acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([C.BLOCK_M], 0.0, tl.float32)
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    batch = a.batch
    if C.VARLEN:
        batch = 1
    for i in range(a.splits):
        part = row + i * batch
        at = part_lse_ptr + (part.to(tl.int64) * a.heads + h) * a.len_q + rows
        lse = tl.load(at, mask=ok, other=float("-inf"))
        part_at = base(part_out, part, h, nothing)
        part_tile = load_rows(part_at, part_out.stride_s, part_out.stride_d, rows, ok, C.DV, C.BLOCK_DV)  # [M, DV]
        acc, l, m = joined(acc, l, m, part_tile, lse)
    if a.sinks_ptr is not None:
        acc, l, m = with_sink(acc, l, m, tl.load(a.sinks_ptr + h).to(tl.float32))
    out_tile, lse = merged(acc, l, m)
    store_rows(
        base(a.out, row, h, nothing),
        a.out.stride_s,
        a.out.stride_d,
        rows,
        ok,
        out_tile,
        C.DV,
        C.BLOCK_DV,
        C,
    )
    tl.store(a.lse_ptr + (row.to(tl.int64) * a.heads + h) * a.len_q + rows, lse, mask=ok)
