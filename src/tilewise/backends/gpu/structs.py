"""Kernel arguments travel in these structs; a kernel has one for its problem, one for its gradients and one for its config.

A NamedTuple is flattened by Triton, keeps its field names in the device functions, and `None` in it is a compile-time fact, so
an absent feature costs nothing. `KernelConfig` is one constexpr: everything a kernel is compiled for. No length is among it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from tilewise.backends.gpu.lists import ListLayout, TileLists
from tilewise.masks.program import Kind, operands


class View(NamedTuple):
    """A tensor (B, H, S, D) of any strides; a broadcast dimension has stride 0."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_s: int
    stride_d: int


class MaskArgs(NamedTuple):
    """A MaskProgram's integers and tensors, and `strides` of the tensors, all consumed left to right."""

    ints: tuple[int, ...]
    tensors: tuple[Any, ...]
    strides: tuple[int, ...]


class MaskLiteral(NamedTuple):
    """A literal, and where its integers, tensors and strides start in `MaskArgs`."""

    kind: Kind
    ints: int
    tensors: int
    strides: int


class MaskTerm(NamedTuple):
    literals: tuple[MaskLiteral, ...]
    reads_data: bool
    tree: int = -1  # the literal that is a tree, where no other reads data


class MaskLayout(NamedTuple):
    """What a mask is made of. Without a mask there are no terms."""

    terms: tuple[MaskTerm, ...] = ()
    reads_data: bool = False
    has_gaps: bool = False  # may a tile inside the hull of the visible ones be EMPTY?

    @classmethod
    @cache
    def of(cls, structure: str) -> MaskLayout:
        terms, strides = [], 0
        for term in operands(structure) if structure else ():
            literals = []
            for kind, ints, tensors in term:
                literals.append(MaskLiteral(kind, ints, tensors, strides))
                strides += 2 * kind.is_documents + 4 * kind.per_head + 3 * kind.is_tree
            data = [i for i, (kind, _, _) in enumerate(term) if kind.reads_data]
            trees = [i for i in data if term[i][0].is_tree]
            terms.append(MaskTerm(tuple(literals), bool(data), trees[0] if trees and trees == data else -1))
        reads_data = any(term.reads_data for term in terms)
        return cls(tuple(terms), reads_data, reads_data or len(terms) > 1)


class Scale(NamedTuple):
    """What the numbers of each token and head are multiplied by."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_s: int


class PageArgs(NamedTuple):
    """Keys and values in pages. What a kernel has no use for is there all the same, as another tensor: see `PageLayout`."""

    entries: Any  # page numbers, those of a sequence side by side
    starts: Any  # (B,): where those of each sequence begin
    counts: Any  # (B,): how many it has
    lengths: Any  # (B,) integers
    k_scale: Scale  # read with SCALED
    v_scale: Scale
    size: int  # entries there are
    page: int  # tokens
    total: int  # pages there are
    rows: int  # queries of each sequence, with EVEN
    parts: int = 0  # partial results that there is room for, with SPAN and SPLIT


class Attention(NamedTuple):
    """One attention problem as the kernels see it. Absent features are None."""

    q: View
    k: View
    v: View
    out: View
    lse_ptr: Any  # (B, H, M) fp32, contiguous; (splits, B, H, M) for partial results
    bias: View | None  # strides for (b, h, q, k)
    alibi: View | None  # slopes: strides for (b, h)
    sinks_ptr: Any
    seed_ptr: Any
    cu_q: Any
    cu_k: Any
    origins: Any  # (B, 4) int32: q, k, head and batch of the whole that each sequence begins at
    mask: MaskArgs
    batch: int
    heads: int
    kv_heads: int
    len_q: int  # of each sequence, or of all together when packed
    len_k: int
    splits: int
    scale: float
    softcap: float
    drop_below: int  # Philox words below it are dropped
    keep_scale: float  # 1 / (1 - p)
    lists: TileLists | None = None
    pages: PageArgs | None = None
    flags_ptr: Any = None  # [programs] int32: whose results are not finite, to be computed once more with care


class Gradients(NamedTuple):
    """What the backward kernels read and write beside the problem.

    `lse2` is in the unit of the scores (log 2, with a bias natural), +inf for an empty row.
    """

    dout: View
    dq: View | None
    dk: View | None
    dv: View | None
    lse2_ptr: Any
    delta_ptr: Any  # rowsum(dO ∘ O) - dLSE
    dlse_ptr: Any
    dbias: View | None
    bias_shape: tuple[int, ...] | None


class Fp16Split(NamedTuple):
    """An fp32 tensor and where its fp16 parts go, one after another along the batch."""

    x: View
    parts: View
    rows: int  # batch of x
    heads: int
    length: int


class PageLayout(NamedTuple):
    """What a kernel knows of pages when it is compiled."""

    PAGE: int = 0  # tokens of a page: a power of two; 0: any number, and each row is looked up
    EVEN: bool = False  # as many queries in every sequence
    SCALED: bool = False  # numbers have a scale: one of each head, or
    PER_TOKEN: bool = False  # one of each token and head
    BITS: bool = False  # e4m3 as bytes
    PAIRS: str = ""  # two columns of "int8" or "e4m3" are read as one number of 16 bits
    Q_FACTORS: bool = False  # queries of bf16 are multiplied as fp16: each row has a factor
    LATENT: bool = False  # values are the first columns of the keys


class KernelConfig(NamedTuple):
    """What a kernel is compiled for."""

    MASK: MaskLayout = MaskLayout()
    BLOCK_M: int = 64
    BLOCK_N: int = 64
    D: int = 64
    DV: int = 64
    BLOCK_D: int = 64  # D padded to a power of two
    BLOCK_DV: int = 64
    VARLEN: bool = False
    PACK: int = 1  # query heads of one key head stacked in a tile's rows
    SPLIT: bool = False  # split-KV
    EARLY: bool = False  # the kernel that merges is launched before this one has ended, and waits for it
    SPAN: int = 0  # keys of a part, where the bits of a row follow from the row alone; 0: they may follow from more
    SOFTCAP: bool = False
    FOLD: bool = True  # scores are a positive multiple of q·k: the scale folds into exp2
    DROPOUT: bool = False
    PRECISION: str = "ieee"  # of products of fp32 tiles that are not split
    FP16_SPLIT: bool = False  # fp32 operands are sums of two fp16 parts
    INTERPRET: bool = False
    EMPTY_ROWS: bool = False  # may a query see no key?
    SUM_M: bool = False  # dBias: the bias has one row, or one column
    SUM_N: bool = False
    TOP: int = 0  # statistics: how many of a row's largest weights
    LISTED: bool = False  # the tiles to visit come from lists
    LISTS: ListLayout = ListLayout()
    ALL_FULL: bool = False  # whatever the lists name is FULL, and no bias hides anything
    PAGED: bool = False  # keys and values lie in pages
    PAGES: PageLayout = PageLayout()
    REST: int = 0  # columns of Q and K beyond BLOCK_D, padded to a power of two
    CAREFUL: bool = False  # only programs that are flagged compute, and read nothing that they do not see


class SeqInfo(NamedTuple):
    """Where a program works: sequence b, query head h (a column of heads when packed), and the sequence's tokens."""

    b: Any
    h: Any
    kv_h: Any
    row: Any  # batch index in the tensors: b, or 0 when packed
    q_start: Any
    k_start: Any  # of its keys; in pages, of its entries in the table
    len_q: Any
    len_k: Any


class Head(NamedTuple):
    """One head of a tensor from token `start` on, with a tensor map where the device has them."""

    view: View
    desc: Any
    row: Any
    h: Any
    start: Any


class KeyTile(NamedTuple):
    """A resident tile of keys and values, from key n on."""

    k_tile: Any
    v_tile: Any
    n: Any


class QueryTile(NamedTuple):
    """A resident tile of queries at the positions q, all of them in [first, last); in the backward also what belongs to them."""

    q_tile: Any
    q: Any
    first: Any
    last: Any
    dout_tile: Any = None
    lse2: Any = None
    delta: Any = None
    factors: Any = None  # of the rows of q_tile, with Q_FACTORS


class PartsAt(NamedTuple):
    """Where the partial results of a tile's rows go."""

    out: Any
    lse: Any
    lses: Any  # from one part to the next
    q: Any
    ok: Any


class Listed(NamedTuple):
    """What a program needs of its lists: the row, the intervals of its sequence, the ids of the side that it holds."""

    row: Any
    terms: tuple[Any, ...]
    ids: Any
