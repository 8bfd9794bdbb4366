"""The arguments of the backward's kernels: NamedTuples, which Triton flattens, with None as a compile-time fact."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.hopper.structs import Divisor, Rows, Term


class Plane(NamedTuple):
    """A tensor (B, H, M, width) with adjacent elements."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_s: int
    width: int


class Walk(NamedTuple):
    """Which tiles a kernel works on, and under which mask; as the forward's arguments."""

    cu_q: Any
    cu_k: Any
    order: Any  # (rounds + 1, programs) int32: tiles by round and program, negative for none; None: they take turns
    terms: tuple[Term, ...]
    heads: Divisor  # query heads, or key heads where the tiles are of keys
    group: Divisor  # query heads of one key head
    blocks: Divisor  # tiles of a head
    batch: int
    len_q: int  # of each sequence, or of all together when packed
    len_k: int
    stat_blocks: int  # tiles of statistics of a query head
    stat_tiles: int  # of all heads; behind dQ's last one is a spare
    total: int
    programs: int
    unit: float  # scores in units of log 2: scale / ln 2, or softcap / ln 2
    slope: float  # scale / softcap
    scale: float
    stats_ptr: Any  # [B·H, tiles, 2, M] fp32: lse in units of log 2 and delta by tile of queries
    dq_ptr: Any  # [B·H, tiles, M·D] fp32, each tile in the order of the registers that hold it
    dq: Rows | None  # of a packed batch, as the next two
    dk: Rows | None
    dv: Rows | None


class Edges(NamedTuple):
    """What the kernels before and after the main one read and write."""

    out: Plane
    dout: Plane
    dq: Plane
    lse_ptr: Any
    dlse_ptr: Any
    stats_ptr: Any
    dq_ptr: Any
    cu_q: Any
    heads: Divisor
    blocks: Divisor  # tiles of queries of a head
    batch: int
    len_q: int
    factor: float  # by which lse enters the statistics
    scale: float
