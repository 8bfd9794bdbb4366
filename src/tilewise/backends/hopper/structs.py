"""The arguments of the kernels: NamedTuples, which Triton flattens, with None as a compile-time fact. No triton is imported."""

from __future__ import annotations

from typing import Any, NamedTuple


class Term(NamedTuple):
    """One conjunction of a mask as intervals: lo <= k - q < past, start <= k < end, narrowed by what device memory holds."""

    lo: int
    past: int
    start: int
    end: int
    off: Any  # (B,): added to lo and past
    first: Any  # (B,): k >= first[b]
    last: Any  # (B,): k < last[b]


class Divisor(NamedTuple):
    """n // value as a product and a shift, exact for 0 <= n < 2³¹: the kernel keeps no reciprocal."""

    value: int
    factor: int
    shift: int

    @classmethod
    def of(cls, value: int) -> Divisor:
        shift = (value - 1).bit_length()
        factor = (((1 << shift) - value) << 32) // value + 1
        return cls(value, factor - (1 << 32) if factor >= 1 << 31 else factor, shift)  # as 32 bits with a sign


class Rows(NamedTuple):
    """A packed output (1, H, T, Dv) to write row by row."""

    ptr: Any
    stride_h: int
    stride_s: int
    width: int


Strides = tuple[int | None, int | None]


class Lists(NamedTuple):
    """The tile lists of a pass (`gpu.lists.TileLists`) as these kernels read them. A stride is None where all share."""

    runs: Any
    counts: Any
    terms: Any
    width: int
    strides: Strides  # of a sequence and of a head, in rows
    terms_stride: int | None = None
    q_ids: Any = None
    k_ids: Any = None  # None also where they are the queries'
    ids_strides: Strides = (None, None)  # of a sequence: queries' ids, keys' ids
    bits: Any = None
    bits_strides: tuple[int | None, int | None, int, int] | None = None  # of a sequence, a head, a row and a word
    bounds: Any = None  # int64 by row and position: first key (or query) seen in PARTIAL tiles, and how many; or -1
    seen: Any = None  # words of 32 keys: a bit is set if some query sees the key, or there is no such key
    seeing: Any = None  # words of 32 queries: a bit is set if the query sees some key, or there is no such query
    seen_strides: Strides = (None, None)  # of a sequence and of a head, in words
    seeing_strides: Strides = (None, None)


class Unaligned(str):
    """A type in place of an address that need be no multiple of 16 bytes, or of a stride."""


class Arguments(NamedTuple):
    """Of a kernel over query tiles or key tiles, beside the tensors' descriptors; None is no argument at all.

    What the forward would derive from these numbers at its start is given too: kept across all roles it would cost the producer
    registers it does not have.
    """

    lse_ptr: Any  # (B, H, M) fp32, contiguous
    cu_q: Any
    cu_k: Any
    order: Any  # (rounds + 1, programs) int32: work tiles by round and program, negative for none; None: round robin
    out: Rows | None  # of a packed batch
    terms: tuple[Term, ...]
    heads: Divisor  # query heads, or key heads over key tiles
    group: Divisor  # query heads of one key head
    blocks: Divisor  # tiles of a head
    batch: int
    len_q: int  # of each sequence, or of all together when packed
    len_k: int
    last_q: int | None  # len_q - 1
    last_block: int | None  # blocks - 1
    stat_blocks: int | None  # tiles of statistics of a query head
    stat_tiles: int | None  # of all heads; behind dQ's last one is a spare
    total: int
    programs: int
    scale_log2: float  # scale · log2 e, or softcap · log2 e: makes scores logarithms to base 2; twice that for "cap"
    softcap_slope: float  # scale / softcap; for "cap" times -2 log2 e
    scale: float | None = None
    stats_ptr: Any = None  # [B·H, tiles, 2, M] fp32: lse in units of log 2 and delta by query tile
    dq_ptr: Any = None  # [B·H, tiles, M·D] fp32, each tile in the order of the registers that hold it
    dq: Rows | None = None  # of a packed batch, as the next two
    dk: Rows | None = None
    dv: Rows | None = None
    lists: Lists | None = None
    sinks_ptr: Any = None  # (H,) fp32
    alibi_ptr: Any = None  # slopes, fp32: (H,), or (B, H)
    alibi_b: int | None = None  # from one sequence to the next
    alibi_unit: float | None = None  # from units of log 2 to those of products q·k
    seed_ptr: Any = None  # of dropout, two words of 32 bits
    drop_below: int | None = None  # Philox words below it are dropped; 32 bits with a sign
    keep_scale: float | None = None  # 1 / (1 - p)
    bias_ptr: Any = None  # numbers, or words of two adjacent keys; positions count within a sequence
    bias_b: Any = None  # from one sequence, head, query and key to the next; where keys are adjacent the last is None
    bias_h: Any = None
    bias_q: int | None = None
    bias_k: int | None = None
    bias_rows: int | None = None  # how many queries and keys there is a bias for
    bias_keys: int | None = None
    bias_flag: Any = None  # raised where something infinite came out
    bias_again: int | None = None  # not 0: run only if the flag is up
    dbias_ptr: Any = None  # its gradient: rows begin at even places, strides count pairs
    dbias_b: Any = None
    dbias_h: Any = None
    dbias_q: int | None = None
    dbias_k: int | None = None  # 0 where all keys share a number; None where each has its own
    max_logit_ptr: Any = None  # (B, H, M) fp32, as the next two
    entropy_ptr: Any = None
    key_lse_ptr: Any = None  # of the keys alone, without the sink
    owners: Any = None  # (blocks,) int32: the sequence of each tile of a packed batch, as its lengths once were


class Plane(NamedTuple):
    """A tensor (B, H, M, width) with adjacent elements."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_s: int
    width: int


class PrePostArguments(NamedTuple):
    """Of the backward's preprocess and postprocess kernels."""

    out: Plane
    dout: Plane
    dq: Plane
    lse_ptr: Any  # (B, H, M) fp32, maybe a part of more queries
    dlse_ptr: Any  # (B, H, M) fp32, contiguous
    stats_ptr: Any
    dq_ptr: Any
    cu_q: Any
    heads: Divisor
    blocks: Divisor  # query tiles of a head
    batch: int
    len_q: int
    factor: float  # by which lse enters the statistics
    shift: float  # what is added then
    scale: float
    sinks_ptr: Any = None  # (H,) fp32
    dsinks_ptr: Any = None  # [B·H, tiles, M] fp32: what each row adds to the gradient of its head's sink
    lse_b: int = 0  # from one sequence, and from one head, to the next
    lse_h: int = 0
