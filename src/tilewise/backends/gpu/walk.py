"""Walking lists of tiles on the device (`lists.py` has the format): the work tile, the tiles it visits, a PARTIAL tile's mask."""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
from tilewise.backends.gpu import lists as fmt
from tilewise.backends.gpu.structs import Listed

ALL_LIVE = tl.constexpr(fmt.ALL_LIVE)


@triton.jit
def listed_tile(a, pid, cu, length, heads, BLOCK: tl.constexpr, C: tl.constexpr):
    """A program's tile, head and sequence: rows with most tiles first, each for all heads and sequences that share it.

    `heads` are those that the programs count. Where these are key heads and lists belong to query heads, there is no such order.
    """
    lists = a.lists
    tiles = tl.cdiv(length, BLOCK)
    if C.VARLEN:
        tiles = length // BLOCK + a.batch
    shared_h = lists.stride_h == 0
    shared_b = lists.stride_b == 0
    ordered = shared_h | (heads == a.heads)
    sequences = a.batch
    if C.VARLEN:
        sequences = 1
    users_h = tl.where(shared_h, heads, 1)
    users = users_h * tl.where(shared_b, sequences, 1)
    row = tl.load(lists.order + pid // users, mask=ordered, other=0)
    user = pid % users
    rows_h = tl.where(shared_h, 1, heads)
    tile = tl.where(ordered, row % tiles, pid % tiles)
    h = tl.where(ordered, tl.where(shared_h, user % users_h, row // tiles % rows_h), pid // tiles % heads)
    b = tl.where(ordered, tl.where(shared_b, user // users_h, row // tiles // rows_h), pid // tiles // heads)
    if C.VARLEN:
        b, tile = tt.find_sequence(cu, a.batch, tile, BLOCK)
    return tile, h, b


@triton.jit
def list_row(a, seq, start, tile, BLOCK: tl.constexpr, C: tl.constexpr):
    """The row of a sequence's tile; `start` is where the sequence begins on the tile's side of a packed batch."""
    row = seq.b * a.lists.stride_b + seq.h * a.lists.stride_h + tile
    if C.VARLEN:
        row = seq.h * a.lists.stride_h + start // BLOCK + seq.b + tile
    return row


@triton.jit
def load_terms(a, seq, C: tl.constexpr):
    """The intervals of a sequence: lo, hi, start, end one after another."""
    terms = ()
    if not C.LISTS.program:
        at = a.lists.terms + seq.b * a.lists.terms_b
        NUMBERS: tl.constexpr = 4 * C.LISTS.intervals
        for i in tl.static_range(NUMBERS):
            terms += (tl.load(at + i),)
    return terms


@triton.jit
def query_ids(a, seq, q):
    """The ids of queries, where PARTIAL tiles compare them; of those that do not exist anything."""
    at = a.lists.q_ids + seq.row.to(tl.int64) * a.lists.q_ids_b + seq.q_start
    return tl.load(at + q, mask=q < seq.len_q, other=0)


@triton.jit
def key_ids(a, seq, k):
    at = a.lists.k_ids + seq.row.to(tl.int64) * a.lists.k_ids_b + seq.k_start
    return tl.load(at + k, mask=k < seq.len_k, other=0)


@triton.jit
def load_listed(a, seq, row, tokens, KEYS: tl.constexpr, C: tl.constexpr):
    """What PARTIAL tiles of a row ask for; `tokens` are those that the program holds, keys or queries."""
    ids = tokens  # where nothing compares ids; Triton 3.6 returns no None
    if C.LISTS.ids:
        if KEYS:
            ids = key_ids(a, seq, tokens)
        else:
            ids = query_ids(a, seq, tokens)
    return Listed(row, load_terms(a, seq, C), ids)


@triton.jit
def tiles_of(a, row, PARTIAL: tl.constexpr):
    """How many tiles of one class a row visits."""
    return tl.load(a.lists.counts + row * 2 + (1 if PARTIAL else 0))


@triton.jit
def run_word(a, row, r, PARTIAL: tl.constexpr):
    """Run r of a row; any word behind the last."""
    r = tl.minimum(r, a.lists.width - 1)
    at = a.lists.runs + row.to(tl.int64) * a.lists.width
    if PARTIAL:
        return tl.load(at + a.lists.width - 1 - r)
    else:
        return tl.load(at + r)


@triton.jit
def first_run(a, row, PARTIAL: tl.constexpr):
    """Where a walk begins: the run, the one after it, their number, and the tile's number in the run.

    The next run is loaded a tile ahead, so that no tile waits for its address.
    """
    return run_word(a, row, row * 0, PARTIAL), run_word(a, row, row * 0 + 1, PARTIAL), row * 0, row * 0


@triton.jit
def next_run(a, row, walk, PARTIAL: tl.constexpr):
    """One tile on."""
    word, following, r, i = walk
    done = i >= ((word >> 16) & 0xFF)
    r += done.to(tl.int32)
    return tl.where(done, following, word), run_word(a, row, r + 1, PARTIAL), r, tl.where(done, 0, i + 1)


@triton.jit
def tile_number(walk):
    """The tile that a walk is at."""
    return (walk[0] & 0xFFFF) + walk[3]


@triton.jit
def visible(a, seq, q, k, listed, word, C: tl.constexpr):
    """The mask over a PARTIAL tile q × k (index tiles that broadcast against each other) of the run `word`."""
    if C.LISTS.program:
        return mp.allowed(a.mask, seq, q, k, C)
    else:
        ok = mp.inside(q, k, _interval(listed, word, 0, C), seq.len_q)
        TERMS: tl.constexpr = C.LISTS.intervals
        for r in tl.static_range(1, TERMS):
            ok |= mp.inside(q, k, _interval(listed, word, r, C), seq.len_q)
        if C.LISTS.ids:
            if q.shape[0] == 1:  # the rows are keys
                q_ids = query_ids(a, seq, q)
                k_ids = listed.ids[:, None]
            else:
                q_ids = listed.ids[:, None]
                k_ids = key_ids(a, seq, k)
            if C.LISTS.ids == 1:
                ok &= q_ids == k_ids
            else:
                ok &= q_ids != k_ids
        if C.LISTS.bits:
            ok &= bits_of(a, seq, q, k, C) != 0
        return ok


@triton.jit
def bits_of(a, seq, q, k, C: tl.constexpr):
    """The packed bits over a tile q × k: a word for 32 neighbouring keys, where a tile has so many."""
    lists = a.lists
    at = lists.bits + seq.b.to(tl.int64) * lists.bits_b + seq.h.to(tl.int64) * lists.bits_h
    if C.BLOCK_N >= 32:
        WORDS: tl.constexpr = C.BLOCK_N // 32
        # the first key of each word
        word = tl.min(tl.min(k, 1), 0) // 32 + tl.arange(0, WORDS)
        row = at + q.to(tl.int64) * lists.bits_row
        exists = q < seq.len_q
        lane = tl.arange(0, 32)
        if q.shape[0] == 1:  # the rows are keys
            inside = exists & (word * 32 < seq.len_k)[:, None]
            words = tl.load(row + (word * lists.bits_w)[:, None], mask=inside, other=0)  # [words, M]
            return ((words[:, None, :] >> lane[None, :, None]) & 1).reshape(C.BLOCK_N, C.BLOCK_M)
        else:
            inside = exists & (word * 32 < seq.len_k)[None, :]
            words = tl.load(row + (word * lists.bits_w)[None, :], mask=inside, other=0)  # [M, words]
            return ((words[:, :, None] >> lane[None, None, :]) & 1).reshape(C.BLOCK_M, C.BLOCK_N)
    else:
        at += q.to(tl.int64) * lists.bits_row + (k >> 5) * lists.bits_w
        words = tl.load(at, mask=(q < seq.len_q) & (k < seq.len_k), other=0)
        return (words >> (k & 31)) & 1


@triton.jit
def seen(a, seq, q, k, mask, bias_tile, C: tl.constexpr):
    """Which columns of a PARTIAL tile hold anything visible: keys that are seen or, where rows are keys, queries that see."""
    ok = visible(a, seq, q, k, mask[1], mask[2], C)
    if bias_tile is not None:
        ok &= bias_tile > float("-inf")
    return tl.max(ok.to(tl.int32), 0) > 0


@triton.jit
def _interval(listed, word, r: tl.constexpr, C: tl.constexpr):
    """The interval of term r, empty where it is not live."""
    end = listed.terms[4 * r + 3]
    if C.LISTS.live:
        end = tl.where(((word >> (24 + r)) & 1) != 0, end, 0)
    return listed.terms[4 * r], listed.terms[4 * r + 1], listed.terms[4 * r + 2], end
