"""New tokens into pages, and rotary position embedding of them and of their queries: one kernel, before attention reads them.

A program has one token and some of its heads, of Q or of K and V. K is turned in fp32 and rounded once, to what the pages hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import tilewise.backends.gpu.paged as pg
import tilewise.backends.gpu.tile as tt
from tilewise.backends.gpu.structs import PageArgs, View

TINY = tl.constexpr(1.1754943508222875e-38)


class AppendArgs(NamedTuple):
    """Tokens are (1, heads, tokens, D). Without queries to turn, `q` and `turned` are None; without new tokens, theirs."""

    q: View | None
    turned: View | None
    k: View | None
    v: View | None
    k_pages: View | None
    v_pages: View | None
    pages: PageArgs
    cu: Any  # where the tokens of each sequence begin, of those that are not EVEN
    cos: View | None  # (1, 1, positions, r / 2)
    sin: View | None
    positions: Any  # of each token; None: they are the last of their sequence
    slots: Any  # of each new token; None: by its position
    batch: int
    heads: int
    kv_heads: int
    q_tokens: int
    tokens: int  # new ones
    q_rows: int  # of each sequence, with EVEN_Q
    rows: int  # new ones of each sequence, with EVEN
    angles: int  # positions that cos and sin have


class AppendConfig(NamedTuple):
    HEADS: int = 16  # of a program
    Q_PARTS: int = 0  # programs for the query heads of a token
    PARTS: int = 1  # programs for the key heads
    HALF: int = 0  # pairs that are turned
    BLOCK_HALF: int = 1
    STEP: int = 1  # from a column to the next of its half: 2 where pairs are neighbours
    REST: int = 0  # columns that are not turned
    BLOCK_REST: int = 1
    DV: int = 64
    BLOCK_DV: int = 64
    EVEN_Q: bool = False
    EVEN: bool = False
    LATENT: bool = False  # values are columns of the keys
    MOST: float = 0.0  # the largest number of pages whose numbers have a scale; 0: they have none
    K_PER_TOKEN: bool = False
    V_PER_TOKEN: bool = False
    BITS: bool = False
    INTERPRET: bool = False


@triton.jit
def owner(a, t):
    """The sequence of packed token t."""
    b = t * 0
    for first in range(0, a.batch, 128):
        each = first + tl.arange(0, 128)
        b += tl.sum((tl.load(a.cu + each + 1, mask=each < a.batch, other=2147483647) <= t).to(tl.int32), 0)
    return b


@triton.jit
def position_of(a, t, rows, EVEN: tl.constexpr):
    """The sequence of token t, and its position there: tokens are the last of their sequence."""
    if EVEN:
        b = t // rows
        past = (b + 1) * rows
    else:
        b = tl.minimum(owner(a, t), a.batch - 1)
        past = tl.load(a.cu + b + 1).to(tl.int32)
    return b, t - past + tl.load(a.pages.lengths + b).to(tl.int32)


@triton.jit
def angles_of(view, a, position, C: tl.constexpr):
    """Cosines or sines of a position [1, HALF]; one outside counts as the nearest."""
    at = tl.minimum(tl.maximum(position, 0), a.angles - 1).to(tl.int64)
    cols = tl.arange(0, C.BLOCK_HALF)
    return tl.load(view.ptr + at * view.stride_s + cols * view.stride_d, mask=cols < C.HALF, other=0.0).to(tl.float32)[None, :]


@triton.jit
def halves(at, view, ok, C: tl.constexpr):
    """The addresses of the first columns of all pairs and of the second ones, and which exist [H, HALF]."""
    cols = tl.arange(0, C.BLOCK_HALF)
    first = at[:, None] + (cols * C.STEP)[None, :] * view.stride_d
    FURTHER: tl.constexpr = 1 if C.STEP == 2 else C.HALF
    return first, first + FURTHER * view.stride_d, ok[:, None] & (cols < C.HALF)[None, :]


@triton.jit
def others(at, view, ok, C: tl.constexpr):
    """The addresses of columns that are not turned, and which exist [H, REST]."""
    cols = tl.arange(0, C.BLOCK_REST)
    return at[:, None] + (2 * C.HALF + cols)[None, :] * view.stride_d, ok[:, None] & (cols < C.REST)[None, :]


@triton.jit
def token_at(view, t, heads):
    """Where the heads of a token begin."""
    return view.ptr + t.to(tl.int64) * view.stride_s + heads.to(tl.int64) * view.stride_h


@triton.jit
def turn_queries(a, t, part, C: tl.constexpr):
    heads = part * C.HEADS + tl.arange(0, C.HEADS)
    ok = (heads < a.heads) & (t < a.q_tokens)
    if a.positions is None:
        _, position = position_of(a, tl.minimum(t, a.q_tokens - 1), a.q_rows, C.EVEN_Q)
    else:
        position = tl.load(a.positions + t, mask=t < a.q_tokens, other=0)
    cos = angles_of(a.cos, a, position, C)
    sin = angles_of(a.sin, a, position, C)
    x_at, y_at, there = halves(token_at(a.q, t, heads), a.q, ok, C)
    x = tl.load(x_at, mask=there, other=0.0).to(tl.float32)
    y = tl.load(y_at, mask=there, other=0.0).to(tl.float32)
    x_at, y_at, there = halves(token_at(a.turned, t, heads), a.turned, ok, C)
    tl.store(x_at, tt.cast(x * cos - y * sin, x_at.dtype.element_ty, C), mask=there)
    tl.store(y_at, tt.cast(y * cos + x * sin, y_at.dtype.element_ty, C), mask=there)
    if C.REST > 0:
        at, there = others(token_at(a.q, t, heads), a.q, ok, C)
        rest = tl.load(at, mask=there, other=0.0)
        at, there = others(token_at(a.turned, t, heads), a.turned, ok, C)
        tl.store(at, rest, mask=there)


@triton.jit
def place_of(a, t, C: tl.constexpr):
    """The page and the place in it that new token t goes to, its position, and whether there is such a place."""
    pages = a.pages
    b, position = position_of(a, tl.minimum(t, a.tokens - 1), a.rows, C.EVEN)
    if a.slots is None:
        first, entries = pg.entries_of(pages, b)
        nth = position // pages.page
        known = (position >= 0) & (nth < entries) & (t < a.tokens)
        number = tl.load(pages.entries + first + nth, mask=known, other=-1).to(tl.int64)
        place = position % pages.page
    else:
        slot = tl.load(a.slots + t, mask=t < a.tokens, other=-1).to(tl.int64)
        known = slot >= 0
        number = slot // pages.page
        place = (slot % pages.page).to(tl.int32)
    return number, place, position, known & (number >= 0) & (number < pages.total)


@triton.jit
def narrow(tile, dtype: tl.constexpr, C: tl.constexpr):
    """Numbers over their scale as pages hold them, rounded to nearest."""
    tile = tl.minimum(tl.maximum(tile, -C.MOST), C.MOST)
    if C.BITS:
        # times 2^-120 the exponents of fp32 are those of e4m3
        bits = (tl.abs(tile) * 7.52316384526264e-37).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        return tl.where(tile < 0, bits | 0x80, bits).to(tl.uint8)
    elif dtype == tl.int8:
        return ((tile + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return tile.to(dtype)


@triton.jit
def put(at, ok, tile, scale, C: tl.constexpr):
    """A tile to pages; `scale` is that of each row where numbers have one."""
    if C.MOST > 0:
        tl.store(at, narrow(tl.div_rn(tile, scale), at.dtype.element_ty, C), mask=ok)
    else:
        tl.store(at, tt.cast(tile, at.dtype.element_ty, C), mask=ok)


@triton.jit
def scale_of(scale, where, heads, ok, largest, PER_TOKEN: tl.constexpr, C: tl.constexpr):
    """The scale of each head [H, 1]; that of a token follows from its largest number, and is written."""
    number, place, _ = where
    at = scale.ptr + number * scale.stride_b + place.to(tl.int64) * scale.stride_s + heads * scale.stride_h
    if PER_TOKEN:
        own = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, C.MOST, tl.float32)), TINY)
        tl.store(at, own, mask=ok)
    else:
        own = tl.load(at, mask=ok, other=1.0)
    return own[:, None]


@triton.jit
def write_keys(a, t, heads, ok, where, C: tl.constexpr):
    number, place, position = where
    new = token_at(a.k, t, heads)
    to = token_at(a.k_pages, place, heads) + number * a.k_pages.stride_b
    largest = tl.full([C.HEADS], 0.0, tl.float32)
    if C.HALF > 0:
        if a.positions is not None:
            position = tl.load(a.positions + t, mask=t < a.tokens, other=0)
        cos = angles_of(a.cos, a, position, C)
        sin = angles_of(a.sin, a, position, C)
        x_at, y_at, there = halves(new, a.k, ok, C)
        x = tl.load(x_at, mask=there, other=0.0).to(tl.float32)
        y = tl.load(y_at, mask=there, other=0.0).to(tl.float32)
        turned_x = x * cos - y * sin
        turned_y = y * cos + x * sin
        largest = tl.maximum(tl.max(tl.abs(turned_x), 1), tl.max(tl.abs(turned_y), 1))
    if C.REST > 0:
        rest_at, rest_there = others(new, a.k, ok, C)
        rest = tl.load(rest_at, mask=rest_there, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
    scale = largest[:, None]
    if C.MOST > 0:
        scale = scale_of(a.pages.k_scale, where, heads, ok, largest, C.K_PER_TOKEN, C)
    if C.HALF > 0:
        x_at, y_at, there = halves(to, a.k_pages, ok, C)
        put(x_at, there, turned_x, scale, C)
        put(y_at, there, turned_y, scale, C)
    if C.REST > 0:
        rest_at, rest_there = others(to, a.k_pages, ok, C)
        put(rest_at, rest_there, rest, scale, C)


@triton.jit
def write_values(a, t, heads, ok, where, C: tl.constexpr):
    number, place, _ = where
    cols = tl.arange(0, C.BLOCK_DV)
    there = ok[:, None] & (cols < C.DV)[None, :]
    at = token_at(a.v, t, heads)[:, None] + cols[None, :] * a.v.stride_d
    tile = tl.load(at, mask=there, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(tile), 1)
    scale = largest[:, None]
    if C.MOST > 0:
        scale = scale_of(a.pages.v_scale, where, heads, ok, largest, C.V_PER_TOKEN, C)
    at = token_at(a.v_pages, place, heads) + number * a.v_pages.stride_b
    put(at[:, None] + cols[None, :] * a.v_pages.stride_d, there, tile, scale, C)


@triton.jit
def append_kernel(a, C: tl.constexpr):
    part = tl.program_id(0) % (C.Q_PARTS + C.PARTS)
    t = tl.program_id(0) // (C.Q_PARTS + C.PARTS)
    if C.Q_PARTS > 0:
        if part < C.Q_PARTS:
            turn_queries(a, t, part, C)
    if C.PARTS > 0:
        if part >= C.Q_PARTS:
            number, place, position, known = place_of(a, t, C)
            if known:
                heads = (part - C.Q_PARTS) * C.HEADS + tl.arange(0, C.HEADS)
                ok = heads < a.kv_heads
                write_keys(a, t, heads, ok, (number, place, position), C)
                if not C.LATENT:
                    write_values(a, t, heads, ok, (number, place, position), C)
