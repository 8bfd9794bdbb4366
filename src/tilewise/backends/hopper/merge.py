"""The second kernel where tiles of queries come in pieces: merges them, in the order of their keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.gpu.merge import joined, merged

ROWS = 8
"""Of a program."""


class Pending(NamedTuple):
    """All but the output: the table of `pieces.Pieces`, results of pieces as in `structs.Parts`, the problem's numbers."""

    cuts: Any
    part_out: Any
    part_lse: Any
    lse_ptr: Any
    heads: int
    blocks: int
    len_q: int


class MergeConfig(NamedTuple):
    ROWS: int
    BLOCK_M: int
    DV: int
    BLOCK_DV: int


@triton.jit
def merge_kernel(out, a, C: tl.constexpr):
    """ROWS rows of a tile of queries that was cut."""
    SHARES: tl.constexpr = C.BLOCK_M // C.ROWS
    cut = a.cuts + tl.program_id(0) // SHARES * 4
    t = tl.load(cut)
    first = tl.load(cut + 1)
    bh = t // a.blocks
    m0 = (a.blocks - 1 - t % a.blocks) * C.BLOCK_M  # tiles are counted from a head's last
    rows = tl.program_id(0) % SHARES * C.ROWS + tl.arange(0, C.ROWS)
    d = tl.arange(0, C.BLOCK_DV)
    acc = tl.full([C.ROWS, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([C.ROWS], 0.0, tl.float32)
    m = tl.full([C.ROWS], float("-inf"), tl.float32)
    for piece in range(first, first + tl.load(cut + 2)):
        at = piece * C.BLOCK_M + rows
        part_tile = tl.load(a.part_out + at[:, None] * C.BLOCK_DV + d[None, :])
        acc, l, m = joined(acc, l, m, part_tile, tl.load(a.part_lse + at))
    out_tile, lse = merged(acc, l, m)
    q = m0 + rows
    ok = q < a.len_q
    head = out.ptr + (bh // a.heads).to(tl.int64) * out.stride_b + (bh % a.heads).to(tl.int64) * out.stride_h
    at = head + q.to(tl.int64)[:, None] * out.stride_s + d[None, :]
    tl.store(at, out_tile.to(out.ptr.dtype.element_ty), mask=ok[:, None] & (d < C.DV)[None, :])
    tl.store(a.lse_ptr + bh.to(tl.int64) * a.len_q + q, lse, mask=ok)
