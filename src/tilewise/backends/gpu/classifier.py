"""The kernels that classify tiles and write lists of them (`lists.py` has the format). They are small: a new mask compiles soon.

Each literal is classified for itself, 0 EMPTY, 1 PARTIAL, 2 FULL, and combined as in `masks/tiles.py`: AND is the minimum, OR
the maximum. Bands and ranges of a term are intersected exactly. Documents are compared by the least and the largest id of a tile
and a set of hashes, which `summary_kernel` writes. A table's blocks within a tile are looked at one by one. Where they are many,
and for dense masks, `map_kernel` looks at all elements of the tile.

Queries [q0, q1) and keys [k0, k1) of a tile are numbers on the side of the row and vectors on the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
from tilewise.backends.gpu import lists as fmt

LEAST = tl.constexpr(-(2**31))
LARGEST = tl.constexpr(2**31 - 1)
HASH = tl.constexpr(-1640531535)  # 2³² over the golden ratio
TILES_OF_WORD = tl.constexpr(16)
ALL_LIVE = tl.constexpr(fmt.ALL_LIVE)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def summary_kernel(a, C: tl.constexpr):
    """The least id, the largest and the set of hashes of each tile of one side, int32 [rows, tiles, 3]."""
    pid = tl.program_id(0)
    tile, row = pid % a.tiles, pid // a.tiles
    start = pid * 0
    length = a.length
    first = tile
    if C.VARLEN:
        b, first = tt.find_sequence(a.cu, a.batch, tile, C.BLOCK)
        start = tl.load(a.cu + b)
        length = tl.load(a.cu + b + 1) - start
    i = first * C.BLOCK + tl.arange(0, C.BLOCK)
    ok = i < length
    ids = tl.load(a.ids + row.to(tl.int64) * a.stride + start + i, mask=ok, other=0)
    bits = ((ids * HASH) >> 27) & 31
    lane = tl.arange(0, 32)
    held = tl.max((ok[None, :] & (bits[None, :] == lane[:, None])).to(tl.int32), 1)
    tl.store(a.out + pid * 3, tl.min(tl.where(ok, ids, LARGEST), 0))
    tl.store(a.out + pid * 3 + 1, tl.max(tl.where(ok, ids, LEAST), 0))
    tl.store(a.out + pid * 3 + 2, tl.sum(held << lane, 0))


@triton.jit
def three(some, every):
    return tl.where(every, 2, tl.where(some, 1, 0))


@triton.jit
def interval_class(interval, q0, q1, k0, k1):
    """Of all differences k - q between the corners of a tile, does the band hold some, or every one?"""
    lo, hi, start, end = interval
    first = tl.maximum(k0, start)
    past = tl.minimum(k1, end)
    some = (q0 < q1) & (first < past) & (tl.maximum(lo, first - q1 + 1) <= tl.minimum(hi, past - 1 - q0))
    every = (start <= k0) & (k1 <= end) & (lo <= k0 - q1 + 1) & (k1 - 1 - q0 <= hi)
    return three(some, some & every)


@triton.jit
def documents_class(a, seq, q0, k0, valid, C: tl.constexpr, S: tl.constexpr):
    """By the summaries of both tiles."""
    q_tile = q0 // C.BLOCK_M
    k_tile = k0 // C.BLOCK_N
    if C.VARLEN:
        q_tile += seq.q_start // C.BLOCK_M + seq.b
        k_tile += seq.k_start // C.BLOCK_N + seq.b
    q_at = a.summaries[S] + (seq.row * a.summary_strides[S] + q_tile) * 3
    k_at = a.summaries[S + 1] + (seq.row * a.summary_strides[S + 1] + k_tile) * 3
    if C.BY_KEY:
        q_min = tl.load(q_at, mask=valid, other=0)
        q_max = tl.load(q_at + 1, mask=valid, other=0)
        q_set = tl.load(q_at + 2, mask=valid, other=0)
        k_min = tl.load(k_at)
        k_max = tl.load(k_at + 1)
        k_set = tl.load(k_at + 2)
    else:
        q_min = tl.load(q_at)
        q_max = tl.load(q_at + 1)
        q_set = tl.load(q_at + 2)
        k_min = tl.load(k_at, mask=valid, other=0)
        k_max = tl.load(k_at + 1, mask=valid, other=0)
        k_set = tl.load(k_at + 2, mask=valid, other=0)
    some = (q_min <= k_max) & (k_min <= q_max) & ((q_set & k_set) != 0)
    every = (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
    return three(some, every)


@triton.jit
def blocks_class(a, seq, q0, q1, k0, k1, valid, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    """By the table's entries that a tile touches. A block beyond the table is not seen."""
    LITERAL: tl.constexpr = C.MASK.terms[t].literals[i]
    S: tl.constexpr = LITERAL.strides
    COLUMNS: tl.constexpr = C.CELLS[t][i][1]
    size_q = a.mask.ints[LITERAL.ints]
    size_k = a.mask.ints[LITERAL.ints + 1]
    strides = a.mask.strides
    at = a.mask.tensors[LITERAL.tensors] + seq.b.to(tl.int64) * strides[S] + seq.h.to(tl.int64) * strides[S + 1]
    some = (q0 + k0) < 0
    every = (q0 + k0) >= 0
    for cell in range(C.CELLS[t][i][0] * COLUMNS):
        row = tl.minimum(q0 // size_q + cell // COLUMNS, (q1 - 1) // size_q)
        column = tl.minimum(k0 // size_k + cell % COLUMNS, (k1 - 1) // size_k)
        inside = valid & (row < strides[S + 3]) & (column < strides[S + 2])
        held = tl.load(at + row.to(tl.int64) * strides[S + 2] + column, mask=inside, other=0) != 0
        some |= held
        every &= held
    return three(some, every)


@triton.jit
def selected_class(a, seq, q0, q1, k0, k1, valid, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    """By the lists of a tile's queries: each names some of the tile's key blocks, whose set is a word of up to 32 bits."""
    LITERAL: tl.constexpr = C.MASK.terms[t].literals[i]
    S: tl.constexpr = LITERAL.strides
    size_q = a.mask.ints[LITERAL.ints]
    size_k = a.mask.ints[LITERAL.ints + 1]
    strides = a.mask.strides
    at = a.mask.tensors[LITERAL.tensors] + seq.b.to(tl.int64) * strides[S]
    at += (seq.h // a.mask.ints[LITERAL.ints + 2]).to(tl.int64) * strides[S + 1]
    first = k0 // size_k
    blocks = (k1 - 1) // size_k - first + 1
    some = (q0 + k0) < 0
    every = (q0 + k0) >= 0
    for step in range(C.CELLS[t][i][0]):
        row = tl.minimum(q0 // size_q + step, (q1 - 1) // size_q)
        exists = valid & (row < strides[S + 3])
        zero = (q0 + k0) * 0
        named = zero
        hit = zero
        for entry in range(strides[S + 2]):
            block = tl.load(at + row.to(tl.int64) * strides[S + 2] + entry + zero, mask=exists, other=-1) - first
            inside = (block >= 0) & (block < blocks)
            hit |= inside.to(tl.int32)
            named |= tl.where(inside, 1 << (block & 31), 0)
        some |= hit > 0
        # more blocks than a word has bits: it is not known that all are named
        every &= (blocks <= 32) & (named == tl.where(blocks == 32, -1, (1 << (blocks & 31)) - 1))
    return three(some, every & some)


@triton.jit
def map_class(a, seq, q0, k0, valid, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    """By the map of the tiles' classes, 2 bits each."""
    SLOT: tl.constexpr = C.MAPS[t][i]
    row = (seq.b * a.map_b[SLOT] + seq.h * a.map_h[SLOT]) + q0 // C.BLOCK_M
    column = k0 // C.BLOCK_N
    word = tl.load(a.maps[SLOT] + row.to(tl.int64) * a.map_words + column // TILES_OF_WORD, mask=valid, other=0)
    return (word >> (column % TILES_OF_WORD * 2)) & 3


@triton.jit
def literal_class(a, seq, q0, q1, k0, k1, valid, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    KIND: tl.constexpr = C.MASK.terms[t].literals[i].kind
    if C.MAPS[t][i] >= 0:
        classes = map_class(a, seq, q0, k0, valid, C, t, i)
    elif KIND.is_documents:
        classes = documents_class(a, seq, q0, k0, valid, C, C.SUMMARIES[t][i])
    elif KIND.is_selected:
        classes = selected_class(a, seq, q0, q1, k0, k1, valid, C, t, i)
    else:
        classes = blocks_class(a, seq, q0, q1, k0, k1, valid, C, t, i)
    if KIND.negated:
        classes = 2 - classes
    return classes


@triton.jit
def term_class(a, seq, q0, q1, k0, k1, valid, C: tl.constexpr, t: tl.constexpr):
    classes = interval_class(mp.term_interval(a.mask, seq, C, t), q0, q1, k0, k1)
    LITERALS: tl.constexpr = len(C.MASK.terms[t].literals)
    for i in tl.static_range(LITERALS):
        if C.MASK.terms[t].literals[i].kind.reads_data:
            classes = tl.minimum(classes, literal_class(a, seq, q0, q1, k0, k1, valid, C, t, i))
    return classes


@triton.jit
def tile_classes(a, seq, q0, q1, k0, k1, valid, C: tl.constexpr):
    """The classes of tiles, and the set of terms that are live in each."""
    classes = (q0 + k0) * 0
    live = classes
    TERMS: tl.constexpr = len(C.MASK.terms)
    for t in tl.static_range(TERMS):
        term = term_class(a, seq, q0, q1, k0, k1, valid, C, t)
        classes = tl.maximum(classes, term)
        if C.LAYOUT.live:
            live |= tl.where(term > 0, 1 << t, 0)
    return tl.where(valid, classes, 0), live


@triton.jit
def store_terms(a, seq, C: tl.constexpr):
    """The intervals of a sequence's terms, as numbers."""
    TERMS: tl.constexpr = len(C.MASK.terms)
    for t in tl.static_range(TERMS):
        lo, hi, start, end = mp.term_interval(a.mask, seq, C, t)
        at = a.terms + seq.b * a.terms_b + 4 * t
        tl.store(at, lo)
        tl.store(at + 1, hi)
        tl.store(at + 2, start)
        tl.store(at + 3, end)


@triton.jit
def runs_of(member, alone: tl.constexpr, SIZE: tl.constexpr):
    """Of the members of a chunk: which begin a run, its last tile's successor, and the run's number."""
    lane = tl.arange(0, SIZE)
    if alone:
        begins = member
        past = lane + 1
    else:
        first = tl.associative_scan(tl.where(member, -1, lane), 0, _larger) + 1
        past = tl.associative_scan(tl.where(member, SIZE, lane), 0, _smaller, reverse=True)
        begins = member & (first == lane)
    return begins, past, tl.cumsum(begins.to(tl.int32), 0) - 1


@triton.jit
def classify_kernel(a, C: tl.constexpr):
    """One row: its counts and runs; the first row of a sequence also writes the sequence's terms."""
    OWN: tl.constexpr = C.BLOCK_N if C.BY_KEY else C.BLOCK_M
    OTHER: tl.constexpr = C.BLOCK_M if C.BY_KEY else C.BLOCK_N
    lane = tl.arange(0, C.CHUNK)
    pid = tl.program_id(0)
    tile, h, b = pid % a.tiles, pid // a.tiles % a.rows_h, pid // a.tiles // a.rows_h
    if C.VARLEN:
        b, tile = tt.find_sequence(a.cu_k if C.BY_KEY else a.cu_q, a.batch, tile, OWN)
    seq = tt.seq_info(a, b, h, C)
    if (tile == 0) & (h == 0):
        store_terms(a, seq, C)
    own_len = seq.len_k if C.BY_KEY else seq.len_q
    other_len = seq.len_q if C.BY_KEY else seq.len_k
    own0 = tile * OWN
    own1 = tl.minimum(own0 + OWN, own_len)
    tiles = tl.where(own0 < own_len, tl.cdiv(other_len, OTHER), 0)
    full_runs = pid * 0
    partial_runs = pid * 0
    full_tiles = pid * 0
    partial_tiles = pid * 0
    at = a.runs + pid.to(tl.int64) * a.width
    for c in range(0, tiles, C.CHUNK):
        j = c + lane
        valid = j < tiles
        other0 = j * OTHER
        other1 = tl.minimum(other0 + OTHER, other_len)
        if C.BY_KEY:
            classes, live = tile_classes(a, seq, other0, other1, own0, own1, valid, C)
            whole = (other0 + OTHER <= other_len) & (own0 + OWN <= own_len)
        else:
            classes, live = tile_classes(a, seq, own0, own1, other0, other1, valid, C)
            whole = other0 + OTHER <= other_len
        full = (classes == 2) & whole
        partial = (classes > 0) & ~full
        begins, past, number = runs_of(full, False, C.CHUNK)
        p_begins, p_past, p_number = runs_of(partial, C.LAYOUT.live, C.CHUNK)
        f_count = tl.sum(begins.to(tl.int32), 0)
        p_count = tl.sum(p_begins.to(tl.int32), 0)
        if C.MOST_FULL > 0:
            # too many runs for the room there is: one for all between the first and the last, to be looked at one by one
            many = (f_count > C.MOST_FULL) | (p_count > C.MOST_PARTIAL)
            visited = classes > 0
            lowest = tl.min(tl.where(visited, lane, C.CHUNK), 0)
            highest = tl.max(tl.where(visited, lane, -1), 0)
            begins = begins & ~many
            full = full & ~many
            partial = tl.where(many, (lane >= lowest) & (lane <= highest), partial)
            p_begins = tl.where(many, lane == lowest, p_begins)
            p_past = tl.where(many, highest + 1, p_past)
            p_number = tl.where(many, 0, p_number)
            f_count = tl.where(many, 0, f_count)
            p_count = tl.where(many, 1, p_count)
        full_word = j | ((past - lane - 1) << 16)
        word = j | ((p_past - lane - 1) << 16)
        if C.LAYOUT.live:
            full_word |= ALL_LIVE
            word |= live << 24
        tl.store(at + full_runs + number, full_word, mask=begins)
        tl.store(at + a.width - 1 - partial_runs - p_number, word, mask=p_begins)
        full_runs += f_count
        partial_runs += p_count
        full_tiles += tl.sum(full.to(tl.int32), 0)
        partial_tiles += tl.sum(partial.to(tl.int32), 0)
    if C.AT_LEAST_ONE:
        none = (full_tiles + partial_tiles == 0) & (tiles > 0)
        tl.store(at + a.width - 1, 0, mask=none)
        partial_tiles = tl.where(none, 1, partial_tiles)
    tl.store(a.counts + pid * 2, full_tiles)
    tl.store(a.counts + pid * 2 + 1, partial_tiles)


@triton.jit
def map_kernel(a, C: tl.constexpr):
    """Classes of 16 neighbouring tiles under one literal, from all their elements, as a word."""
    pid = tl.program_id(0)
    word = pid % a.map_words
    i = pid // a.map_words % a.tiles
    h = pid // a.map_words // a.tiles % a.rows_h
    b = pid // a.map_words // a.tiles // a.rows_h
    seq = tt.seq_info(a, b, h, C)
    q = i * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    result = pid * 0
    for s in range(TILES_OF_WORD):
        k = (word * TILES_OF_WORD + s) * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
        inside = (q < a.len_q)[:, None] & (k < a.len_k)[None, :]
        held = mp.table_entry(a.mask, seq, q[:, None], k[None, :], C, C.TERM, C.LITERAL)
        some = tl.max(tl.max((held & inside).to(tl.int32), 1), 0)
        every = tl.min(tl.min((held | ~inside).to(tl.int32), 1), 0)
        result |= tl.where(some == 0, 0, some + every) << (2 * s)
    tl.store(a.out + pid, result)


@triton.jit
def pack_kernel(a, C: tl.constexpr):
    """Bits of a dense mask, 32 neighbouring keys in a word; a mask that all keys share has one word of equal bits a row."""
    pid = tl.program_id(0)
    column = pid % a.columns * C.WORDS + tl.arange(0, C.WORDS)
    row = pid // a.columns % a.row_blocks * C.ROWS + tl.arange(0, C.ROWS)
    h = pid // a.columns // a.row_blocks % a.heads
    b = pid // a.columns // a.row_blocks // a.heads
    lane = tl.arange(0, 32)
    k = column[None, :, None] * 32 + lane[None, None, :]
    at = a.dense + b.to(tl.int64) * a.strides[0] + h.to(tl.int64) * a.strides[1]
    at += row[:, None, None].to(tl.int64) * a.strides[2] + k.to(tl.int64) * a.strides[3]
    inside = (row < a.rows)[:, None, None] & ((k < a.keys) | C.SHARED)
    held = tl.load(at, mask=inside, other=0) != 0
    if C.NEGATED:
        held = inside & ~held
    words = tl.sum(held.to(tl.int32) << lane[None, None, :], 2)
    to = a.out + ((b.to(tl.int64) * a.heads + h) * a.rows + row[:, None]) * a.words + column[None, :]
    tl.store(to, words, mask=(row < a.rows)[:, None] & (column < a.words)[None, :])
