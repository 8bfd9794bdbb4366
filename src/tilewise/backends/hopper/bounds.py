"""Which keys a query sees in the PARTIAL tiles of its list, as one interval: what most masks of documents come to.

Kernels then read a pair of numbers for each query instead of ids: 2 loads in place of 34 a thread and tile. Whether the
interval says it all is found here, on the device, from every element of the PARTIAL tiles, for each row of the lists. So ids may
stand in any order; in rows where documents are not contiguous, or terms leave gaps, kernels compare ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.gpu.launch import LaunchOptions
from tilewise.backends.gpu.lists import ListLayout, TileLists
from tilewise.backends.gpu.record import Launch
from tilewise.backends.hopper.seen import COUNT_MASK, FIRST_MASK, LIVE, RUN_LENGTH, row_lists, row_place, visible
from tilewise.problem import Problem

FAR = tl.constexpr(1 << 30)
"""Further than any tensor is long."""


class BoundsArgs(NamedTuple):
    lists: TileLists
    out: Any  # int64 [rows, positions of a row]
    heads: int
    tiles: int
    len_q: int
    len_k: int


class BoundsConfig(NamedTuple):
    LAYOUT: ListLayout
    BLOCK_M: int
    BLOCK_N: int
    BY_KEY: bool


@triton.jit
def bounds_kernel(a, C: tl.constexpr):
    """One row of lists: for each of its positions the first of the other side's that it sees in PARTIAL tiles, and from bit 32 on
    how many from there on; -1 at all of them where some position sees with gaps. A row without PARTIAL tiles sees all."""
    OWN: tl.constexpr = C.BLOCK_N if C.BY_KEY else C.BLOCK_M
    OTHER: tl.constexpr = C.BLOCK_M if C.BY_KEY else C.BLOCK_N
    AXIS: tl.constexpr = 0 if C.BY_KEY else 1
    row, bh, _, own = row_place(a, OWN)
    full, partial, runs = row_lists(a.lists, row)
    first = own * 0 + FAR
    last = own * 0 - 1
    # the same counted in PARTIAL tiles alone, where what is seen must be without a gap
    begin = first
    end = last
    seen = own * 0
    gaps = row * 0
    among = row * 0  # of the run's tiles
    for n in range(partial):
        if gaps == 0:
            word = tl.load(runs)
            j = (word & FIRST_MASK) + among
            other = j * OTHER + tl.arange(0, OTHER)
            if C.BY_KEY:
                ok = visible(a, bh, word >> LIVE, other, own, C)
            else:
                ok = visible(a, bh, word >> LIVE, own, other, C)
            at = other[:, None] if C.BY_KEY else other[None, :]
            lowest = tl.min(tl.where(ok, at, FAR), AXIS)
            highest = tl.max(tl.where(ok, at, -1), AXIS)
            first = tl.minimum(first, lowest)
            last = tl.maximum(last, highest)
            shift = (n - j) * OTHER
            begin = tl.minimum(begin, tl.where(highest < 0, FAR, lowest + shift))
            end = tl.maximum(end, tl.where(highest < 0, -1, highest + shift))
            seen += tl.sum(ok.to(tl.int32), AXIS)
            gaps = tl.max(((seen > 0) & (end - begin + 1 != seen)).to(tl.int32), 0)
            past = among == ((word >> RUN_LENGTH) & COUNT_MASK)
            runs -= past.to(tl.int32)
            among = tl.where(past, 0, among + 1)
    first = tl.where(seen > 0, first, 0)
    width = tl.where(seen > 0, last + 1 - first, 0)
    whole = (partial == 0) & (full > 0)
    first = tl.where(whole, 0, first)
    width = tl.where(whole, FAR, width)
    pair = first.to(tl.int64) | (width.to(tl.int64) << 32)
    at = a.out + row.to(tl.int64) * OWN + tl.arange(0, OWN)
    tl.store(at, tl.where(gaps > 0, -1, pair))


def list_bounds(problem: Problem, lists: TileLists, config: Any, by_key: bool) -> Tensor:
    """The bounds of the lists of a pass whose layout has ids."""
    block, length = (config.BLOCK_N, problem.seqlen_k) if by_key else (config.BLOCK_M, problem.seqlen_q)
    tiles = -(-length // block)
    size_b, size_h = (problem.batch if lists.stride_b else 1), (problem.heads if lists.stride_h else 1)
    counts: Tensor = lists.counts
    out = torch.empty(size_b * size_h * tiles * block, dtype=torch.int64, device=counts.device)
    args = BoundsArgs(lists, out, size_h, tiles, problem.seqlen_q, problem.seqlen_k)
    shape = BoundsConfig(config.LISTS, config.BLOCK_M, config.BLOCK_N, by_key)
    Launch(bounds_kernel, size_b * size_h * tiles, (args,), shape, LaunchOptions(8, 1)).run()
    return out
