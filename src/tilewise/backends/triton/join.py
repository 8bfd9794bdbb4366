"""One merge of what several launches computed for the same queries: each sequence's own keys, and what it shares with others.

Each launch leaves its parts as they are, one for each split of its keys, and one kernel sums all of them: the partial results are
read once, and there is one launch where torch would take forty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tilewise.backends.gpu.merge import add_parts, add_sink, normalized
from tilewise.backends.gpu.structs import Head, View
from tilewise.backends.gpu.tile import base, rows_at, store_rows


class Source(NamedTuple):
    """The parts of a launch: out (parts, H, rows, DV), and an LSE for each of their rows, one after the other."""

    out: View
    lse_ptr: Any
    place: Any  # the row of each token, −1 for none; None: rows are tokens
    parts: int
    rows: int


class JoinArgs(NamedTuple):
    """Sources, the first of them what each token sees of its own; the result has one part."""

    sources: tuple[Source, ...]
    out: View
    lse_ptr: Any
    sinks_ptr: Any
    tokens: int
    heads: int
    none: None = None  # beside it triton 3.6 learns of constants among the strides


class JoinConfig(NamedTuple):
    SOURCES: int = 2
    DV: int = 64
    BLOCK_DV: int = 64
    BLOCK_N: int = 8  # parts that are read together
    INTERPRET: bool = False
    EARLY: bool = False  # launched before the kernel in front of it has ended


@triton.jit
def add_source(acc, l, m, source, token, h, heads, C: tl.constexpr):
    """Add the parts of a source, BLOCK_N at a time."""
    row = token
    if source.place is not None:
        row = tl.load(source.place + token)
    count = tl.where(row >= 0, source.parts, 0)
    by_part = View(
        source.out.ptr, source.out.stride_b, source.out.stride_h, source.out.stride_b, source.out.stride_d
    )  # [parts, DV]
    at = base(Head(source.out, None, token * 0, h, row))
    for first in range(0, count, C.BLOCK_N):
        part = first + tl.arange(0, C.BLOCK_N)
        there = part < count
        part = part.to(tl.int64)
        lses = tl.load(source.lse_ptr + (part * heads + h) * source.rows + row, mask=there, other=float("-inf"))
        acc, l, m = add_parts(acc, l, m, rows_at(at, by_part, part, there, C.DV, C.BLOCK_DV), lses)
    return acc, l, m


@triton.jit
def join_kernel(a, C: tl.constexpr):
    """A head of a token: out = Σ exp(lse_i - lse) out_i over all parts. A token that sees nothing of its own is none."""
    if C.EARLY:
        gdc_wait()
    pid = tl.program_id(0)
    token = pid // a.heads
    h = pid % a.heads
    acc = tl.full([1, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([1], 0.0, tl.float32)
    m = tl.full([1], float("-inf"), tl.float32)
    acc, l, m = add_source(acc, l, m, a.sources[0], token, h, a.heads, C)
    none = m == float("-inf")
    SOURCES: tl.constexpr = C.SOURCES
    for i in tl.static_range(1, SOURCES):
        acc, l, m = add_source(acc, l, m, a.sources[i], token, h, a.heads, C)
    acc = tl.where(none[:, None], 0.0, acc)
    l = tl.where(none, 0.0, l)
    m = tl.where(none, float("-inf"), m)
    if a.sinks_ptr is not None:
        acc, l, m = add_sink(acc, l, m, tl.load(a.sinks_ptr + h).to(tl.float32))
    out_tile, lse = normalized(acc, l, m)
    one = tl.arange(0, 1)
    store_rows(base(Head(a.out, None, pid * 0, h, token)), a.out, one, one == 0, out_tile, C.DV, C.BLOCK_DV, C)
    tl.store(a.lse_ptr + h.to(tl.int64) * a.tokens + token + one, lse)
