"""Which keys some query sees and which queries see some key, as words of 32 bits.

What a mask of tile lists hides from everyone may hold anything, so it becomes zeros in shared memory (`zeroing.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.gpu.launch import LaunchOptions
from tilewise.backends.gpu.lists import (
    COUNT_BITS,
    COUNT_SHIFT,
    DIFFERENT,
    FIRST_BITS,
    LIVE_SHIFT,
    ListLayout,
    TileLists,
)
from tilewise.backends.gpu.record import Launch
from tilewise.backends.hopper.list_plan import Words
from tilewise.problem import Problem

FIRST_MASK = tl.constexpr((1 << FIRST_BITS) - 1)
COUNT_MASK = tl.constexpr((1 << COUNT_BITS) - 1)
RUN_LENGTH = tl.constexpr(COUNT_SHIFT)
LIVE = tl.constexpr(LIVE_SHIFT)
NOT_EQUAL = tl.constexpr(DIFFERENT)
PADDED = 256
"""Rows of words are filled up to so many positions: kernels read whole tiles of them."""


class SeenArgs(NamedTuple):
    lists: TileLists
    out: Any  # int32 [rows of lists' sequences and heads, words]
    heads: int
    tiles: int
    words: int
    len_q: int
    len_k: int


class SeenConfig(NamedTuple):
    LAYOUT: ListLayout
    BLOCK_M: int
    BLOCK_N: int
    BY_KEY: bool


@triton.jit
def row_place(a, OWN: tl.constexpr):
    """A program's row of lists: (its number, that of its sequence and head in one, its tile in them, positions of the tile)."""
    row = tl.program_id(0)
    bh = row // a.tiles
    tile = row - bh * a.tiles
    return row, bh, tile, tile * OWN + tl.arange(0, OWN)


@triton.jit
def row_lists(lists, row):
    """(FULL tiles of a row, PARTIAL ones, where the first run of these is, behind which stand the others from right to left)."""
    runs = lists.runs + row.to(tl.int64) * lists.width + lists.width - 1
    return tl.load(lists.counts + 2 * row), tl.load(lists.counts + 2 * row + 1), runs


@triton.jit
def visible(a, bh, live, q, k, C: tl.constexpr):
    """Which queries q see which keys k of a PARTIAL tile, [queries, keys]."""
    INTERVALS: tl.constexpr = C.LAYOUT.intervals
    lists = a.lists
    b = bh // a.heads
    delta = k[None, :] - q[:, None]
    found = delta * 0
    for r in tl.static_range(INTERVALS):
        at = lists.terms + b * lists.terms_b + 4 * r
        inside = (delta >= tl.load(at)) & (delta <= tl.load(at + 1))
        inside = inside & ((k >= tl.load(at + 2)) & (k < tl.load(at + 3)))[None, :]
        if C.LAYOUT.live:
            inside = inside & (((live >> r) & 1) != 0)
        found = found | inside.to(tl.int32)
    q_ok = q < a.len_q
    k_ok = k < a.len_k
    ok = (found != 0) & q_ok[:, None] & k_ok[None, :]
    if C.LAYOUT.ids > 0:
        q_ids = tl.load(lists.q_ids + b * lists.q_ids_b + q, mask=q_ok, other=0)
        k_ids = tl.load(lists.k_ids + b * lists.k_ids_b + k, mask=k_ok, other=0)
        same = q_ids[:, None] == k_ids[None, :]
        if C.LAYOUT.ids == NOT_EQUAL:
            same = same == 0
        ok = ok & same
    if C.LAYOUT.bits:
        h = bh - b * a.heads
        base = lists.bits + b.to(tl.int64) * lists.bits_b + h.to(tl.int64) * lists.bits_h
        words = base + q[:, None] * lists.bits_row + (k // 32)[None, :] * lists.bits_w
        bits = tl.load(words, mask=q_ok[:, None] & k_ok[None, :], other=0)
        ok = ok & (((bits >> (k % 32)[None, :]) & 1) != 0)
    return ok


@triton.jit
def seen_kernel(a, C: tl.constexpr):
    """One row of lists: bits of the positions of the side that is held. A row with a FULL tile has them all."""
    OWN: tl.constexpr = C.BLOCK_N if C.BY_KEY else C.BLOCK_M
    row, bh, tile, own = row_place(a, OWN)
    full, partial, runs = row_lists(a.lists, row)
    length = a.len_k if C.BY_KEY else a.len_q
    found = ((own >= length) | (full > 0)).to(tl.int32)
    left = tl.where(full > 0, 0, partial)
    while left > 0:
        word = tl.load(runs)
        first = word & FIRST_MASK
        count = ((word >> RUN_LENGTH) & COUNT_MASK) + 1
        for j in range(first, first + count):
            if C.BY_KEY:
                ok = visible(a, bh, word >> LIVE, j * C.BLOCK_M + tl.arange(0, C.BLOCK_M), own, C)
            else:
                ok = visible(a, bh, word >> LIVE, own, j * C.BLOCK_N + tl.arange(0, C.BLOCK_N), C)
            found = found | tl.max(ok.to(tl.int32), 0 if C.BY_KEY else 1)
        left -= count
        runs -= 1
    bit = tl.arange(0, 32)
    packed = tl.sum(tl.reshape(found, [OWN // 32, 32]) << bit[None, :], 1)
    at = a.out + bh.to(tl.int64) * a.words + tile * (OWN // 32) + tl.arange(0, OWN // 32)
    tl.store(at, packed, mask=tile * (OWN // 32) + tl.arange(0, OWN // 32) < a.words)


def seen_words(problem: Problem, lists: TileLists, config: Any, by_key: bool) -> Words:
    """The words of keys that some query sees (by key), or of queries that see some key, from the lists of a pass."""
    block, length = (config.BLOCK_N, problem.seqlen_k) if by_key else (config.BLOCK_M, problem.seqlen_q)
    tiles = -(-length // block)
    size_b, size_h = (problem.batch if lists.stride_b else 1), (problem.heads if lists.stride_h else 1)
    words = -(-length // PADDED) * (PADDED // 32)
    counts: Tensor = lists.counts
    out = torch.full((size_b, size_h, words), -1, dtype=torch.int32, device=counts.device)
    args = SeenArgs(lists, out, size_h, tiles, words, problem.seqlen_q, problem.seqlen_k)
    shape = SeenConfig(config.LISTS, config.BLOCK_M, config.BLOCK_N, by_key)
    Launch(seen_kernel, size_b * size_h * tiles, (args,), shape, LaunchOptions(4, 1)).run()
    return Words(out, words * size_h if size_b > 1 else 0, words if size_h > 1 else 0)
