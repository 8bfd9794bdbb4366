"""Keys and values in pages, on the device: where a tile's tokens lie, loading them, and the scales of narrow numbers.

The page numbers of a tile are loaded a tile ahead (`page_numbers`), so that no load waits for the table. Where a page holds a
whole tile they are one number, else one for each row. A number that is no page's counts as the nearest that is: nothing outside
of the pages is read, whatever the table holds. Entries behind a sequence's last token are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.pairs as pr
import tilewise.backends.gpu.tile as tt
from tilewise.backends.gpu.structs import SeqInfo


@triton.jit
def work_tile(a, pid, C: tl.constexpr):
    """A program's tile, group of heads and sequence."""
    groups = a.heads // C.PACK
    if C.PAGES.EVEN:
        tiles = tl.cdiv(a.pages.rows * C.PACK, C.BLOCK_M)
        return tiles - 1 - pid % tiles, pid // tiles % groups, pid // tiles // groups
    else:
        return tt.work_tile(a, pid, a.cu_q, a.len_q * C.PACK, groups, C.BLOCK_M, True, C)


@triton.jit
def seq_info(a, b, h, C: tl.constexpr):
    """The sequence b as query head h sees it: its last queries, and no more keys than its pages have places for."""
    pages = a.pages
    if C.PAGES.EVEN:
        q_start = b * pages.rows
        q_len = pages.rows
    else:
        q_start = tl.load(a.cu_q + b)
        q_len = tl.load(a.cu_q + b + 1) - q_start
    first, entries = entries_of(pages, b)
    k_len = tl.minimum(tl.maximum(tl.load(pages.lengths + b), 0), entries * pages.page).to(tl.int32)
    return SeqInfo(b, h, h // (a.heads // a.kv_heads), b * 0, q_start, first, q_len, k_len)


@triton.jit
def entries_of(pages, b):
    """Where the entries of sequence b begin, and how many they are."""
    first = tl.minimum(tl.maximum(tl.load(pages.starts + b), 0), pages.size)
    return first, tl.minimum(tl.maximum(tl.load(pages.counts + b), 0), pages.size - first)


@triton.jit
def page_numbers(a, seq, n, C: tl.constexpr):
    """The page of the tile of keys from n on, or that of each key."""
    pages = a.pages
    if C.PAGES.PAGE >= C.BLOCK_N:
        nth = n // C.PAGES.PAGE
        there = nth * C.PAGES.PAGE < seq.len_k
    elif C.PAGES.PAGE > 0:
        nth = n // C.PAGES.PAGE + tl.arange(0, C.BLOCK_N) // C.PAGES.PAGE
        there = nth * C.PAGES.PAGE < seq.len_k
    else:
        k = n + tl.arange(0, C.BLOCK_N)
        nth = k // pages.page
        there = k < seq.len_k
    number = tl.load(pages.entries + seq.k_start + nth, mask=there, other=0)
    return tl.minimum(tl.maximum(number, 0), pages.total - 1)


@triton.jit
def token_pointers(a, view, head, n, C: tl.constexpr):
    """The addresses [N] of the tokens of a head in the tile of keys from n on."""
    k = tl.arange(0, C.BLOCK_N)
    at = view.ptr + head.h.to(tl.int64) * view.stride_h
    page = head.desc.to(tl.int64) * view.stride_b
    if C.PAGES.PAGE >= C.BLOCK_N:
        return at + page + (n % C.PAGES.PAGE).to(tl.int64) * view.stride_s + k * view.stride_s
    elif C.PAGES.PAGE > 0:
        return at + (page + (k % C.PAGES.PAGE) * view.stride_s)
    else:
        return at + (page + ((n + k) % a.pages.page).to(tl.int64) * view.stride_s)


@triton.jit
def load_pages(a, head, n, ok, FIRST: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr):
    """Columns of a tile of tokens, FIRST and those after it, in the dtype of the queries; 0 where not `ok` (None: all are). Pairs
    stay as they are."""
    at = token_pointers(a, head.view, head, n, C)
    if C.PAGES.PAIRS != "":
        return _columns(at.to(tl.pointer_type(tl.int16), bitcast=True), 1, ok, FIRST // 2, WIDTH // 2, PADDED // 2)
    else:
        tile = _columns(at, head.view.stride_d, ok, FIRST, WIDTH, PADDED)
        if C.PAGES.BITS:
            tile = of_e4m3(tile)
        if C.INTERPRET and C.PAGES.SCALED:  # the interpreter makes no bf16 of integers; products are of fp32 there
            return tile.to(tl.float32)
        else:
            return tile.to(a.q.ptr.dtype.element_ty)


@triton.jit
def _columns(at, stride, ok, FIRST: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    cols = FIRST + tl.arange(0, PADDED)
    where = at[:, None] + cols[None, :] * stride
    if ok is None:
        if WIDTH >= PADDED:
            return tl.load(where)
        else:
            return tl.load(where, mask=(cols < FIRST + WIDTH)[None, :], other=0.0)
    elif WIDTH >= PADDED:
        return tl.load(where, mask=ok[:, None], other=0.0)
    else:
        return tl.load(where, mask=ok[:, None] & (cols < FIRST + WIDTH)[None, :], other=0.0)


@triton.jit
def of_e4m3(tile):
    """Bytes as the numbers that they stand for, in fp16, which holds all of them: its exponents are 8 larger."""
    bits = tile.to(tl.uint16)
    number = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def load_scale(a, scale, head, n, ok, C: tl.constexpr):
    """The scale of a head's numbers, or those of its tokens in the tile of keys from n on."""
    if not C.PAGES.PER_TOKEN:
        return head_scale(scale, head.h)
    elif ok is None:
        return tl.load(token_pointers(a, scale, head, n, C))[None, :]
    else:
        return tl.load(token_pointers(a, scale, head, n, C), mask=ok, other=0.0)[None, :]


@triton.jit
def head_scale(scale, h):
    return tl.load(scale.ptr + h.to(tl.int64) * scale.stride_h)


@triton.jit
def empty_sums(C: tl.constexpr):
    """acc before the first key; of pairs, the even columns and the odd ones."""
    if C.PAGES.PAIRS != "":
        none = tl.full([C.BLOCK_M, C.BLOCK_DV // 2], 0.0, tl.float32)
        return none, none
    else:
        return tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)


@triton.jit
def rescaled(acc, factors, C: tl.constexpr):
    if C.PAGES.PAIRS != "":
        return acc[0] * factors[:, None], acc[1] * factors[:, None]
    else:
        return acc * factors[:, None]


@triton.jit
def whole_sums(a, acc, l, C: tl.constexpr):
    """acc [M, DV] and l, without what they were multiplied by."""
    if C.PAGES.Q_FACTORS:
        return pr.together(acc) * pr.LIFTED, l * pr.LIFTED
    elif C.PAGES.PAIRS != "":
        return pr.together(acc) * pr.unit_of(a, C), l
    else:
        return acc, l


@triton.jit
def add_values(a, p_tile, tile, scale, acc, C: tl.constexpr):
    """acc + weights · values, of a tile as `load_pages` gives it; `scale`: one for each token, or None."""
    if C.PAGES.PAIRS != "":
        even, odd = pr.even_and_odd(a, tile, C)
        return _add(p_tile, even, scale, acc[0], C), _add(p_tile, odd, scale, acc[1], C)
    else:
        return _add(p_tile, tile, scale, acc, C)


@triton.jit
def _add(p_tile, v_tile, scale, acc, C: tl.constexpr):
    if scale is None:
        return tt.dot(p_tile, v_tile, acc, C)
    else:
        return weighted(p_tile, v_tile, scale, acc, C)


@triton.jit
def weighted(p_tile, v_tile, scale, acc, C: tl.constexpr):
    """acc + weights · values, which have a scale for each token. fp16 has few exponents: there weights are multiplied by its part
    of the largest scale; with SPAN, of what is largest in their own row."""
    if v_tile.dtype == tl.float16 and C.SPAN > 0:
        p_tile = p_tile * scale
        own = tl.maximum(tl.max(tl.abs(p_tile), 1), 1e-30)[:, None]
        none = tl.full(acc.shape, 0.0, tl.float32)
        return tl.fma(tt.dot(p_tile / own, v_tile, none, C), tl.broadcast_to(own, acc.shape), acc)
    elif v_tile.dtype == tl.float16:
        largest = tl.maximum(tl.max(tl.abs(scale)), 1e-30)
        none = tl.full(acc.shape, 0.0, tl.float32)
        return acc + tt.dot(p_tile * (scale / largest), v_tile, none, C) * largest
    else:
        return tt.dot(p_tile * scale, v_tile, acc, C)


@triton.jit
def load_in_two(head, rows, ok, C: tl.constexpr):
    """Queries as BLOCK_D columns and those after them, padded."""
    at = tt.base(head)
    if C.PACK > 1:
        at = at[:, None]
    first = tt.rows_at(at, head.view, rows, ok, C.BLOCK_D, C.BLOCK_D)
    return first, tt.rows_at(at + C.BLOCK_D * head.view.stride_d, head.view, rows, ok, C.D - C.BLOCK_D, C.REST)


@triton.jit
def product(a, q_tile, k_tile, more, C: tl.constexpr):
    """q·kᵀ in fp32 of tiles as `load_pages` gives them; `more`: the columns beyond BLOCK_D, or None."""
    if C.PAGES.PAIRS != "":
        s_tile = tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
        if more is None:
            return pr.product(a, q_tile, k_tile, s_tile, C)
        else:
            return pr.product(a, q_tile[1], more, pr.product(a, q_tile[0], k_tile, s_tile, C), C)
    elif more is None:
        return tt.product(q_tile, k_tile, C)[0]
    else:
        s_tile, _ = tt.product(q_tile[0], k_tile, C)
        return tt.mma(q_tile[1], tl.trans(more), s_tile, C)
