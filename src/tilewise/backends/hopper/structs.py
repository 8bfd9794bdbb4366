"""The arguments of the kernel: NamedTuples, which Triton flattens, with None as a compile-time fact. No triton is imported."""

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
    """n // value as a product and a shift, exact for 0 <= n < 2³¹: the kernel divides by it without a reciprocal to keep."""

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


class Arguments(NamedTuple):
    """Beside the tensors' descriptors. What the kernel would derive from these numbers at its start is given too: kept across
    all roles it would cost the loading warp registers it does not have."""

    lse_ptr: Any  # (B, H, M) fp32, contiguous
    cu_q: Any
    cu_k: Any
    order: Any  # (rounds + 1, programs) int32: tiles by round and program, negative for none; None: they take turns
    out: Rows | None  # of a packed batch
    terms: tuple[Term, ...]
    heads: Divisor
    group: Divisor  # query heads of one key head
    blocks: Divisor  # tiles of queries of a head
    batch: int
    len_q: int  # of each sequence, or of all together when packed
    len_k: int
    last_q: int  # len_q - 1
    last_block: int  # the number of the last tile of queries of a head
    total: int  # tiles of queries
    programs: int
    unit: float  # scores in units of log 2: scale / ln 2, or softcap / ln 2
    slope: float  # scale / softcap
