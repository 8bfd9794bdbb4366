"""Walking tile lists (`backends/gpu/lists.py`): which tiles a work tile visits, and which of a PARTIAL tile's keys a query sees.

PARTIAL tiles come first, then FULL ones, so that a kernel has one loop with a mask and one without. A row without tiles is walked
as one PARTIAL tile beyond the tensor, where loads fill in zeros and no key is visible: no role needs a path of its own for it.

The producer alone walks. Beside each tile it leaves a word in shared memory that says which one it is: the consumers have no
registers for a place in a list.
"""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from tilewise.backends.gpu.lists import COUNT_BITS, COUNT_SHIFT, DIFFERENT, FIRST_BITS, LIVE_BITS, LIVE_SHIFT
from tilewise.backends.hopper.compat import aggregate, gl, gluon

FIRST_MASK = gl.constexpr((1 << FIRST_BITS) - 1)
COUNT_MASK = gl.constexpr((1 << COUNT_BITS) - 1)
RUN_LENGTH = gl.constexpr(COUNT_SHIFT)
RUN_NUMBER = gl.constexpr(COUNT_BITS)
LIVE = gl.constexpr(LIVE_SHIFT)
FAR = gl.constexpr(1 << 29)
"""Further than any tensor is long, and twice that is no overflow."""
NOT_EQUAL = gl.constexpr(DIFFERENT)
PARTIAL = gl.constexpr(1 << LIVE_SHIFT + LIVE_BITS)
"""In an announced word: the tile is PARTIAL."""
WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@aggregate
class Cursor:
    """A place in a row's list."""

    word: gl.tensor  # the run
    at: gl.tensor  # its number among the PARTIAL or the FULL ones in the upper bits, the tile's number in it in the lower


@gluon.jit
def place(b, h, strides):
    """Where sequence b's and head h's part of an array begins; a stride of None is 0, at no cost."""
    at = b * 0
    if strides[0] is not None:
        at += b * strides[0]
    if strides[1] is not None:
        at += h * strides[1]
    return at


@gluon.jit
def row_of(lists, b, h, tile):
    """The row of a tile of the side that is held; h is a query head."""
    return place(b, h, lists.strides) + tile


@gluon.jit
def row_counts(lists, row):
    """(PARTIAL tiles of a row, all that are walked)."""
    full = gl.load(lists.counts + 2 * row)
    partial = gl.load(lists.counts + 2 * row + 1)
    partial = gl.where(full + partial > 0, partial, 1)
    return partial, partial + full


@gluon.jit
def runs_of(lists, row):
    return lists.runs + row.to(gl.int64) * lists.width


@gluon.jit
def first_tile(lists, row, beyond):
    """The place of a row's first tile, which is tile `beyond` if the row has none."""
    full = gl.load(lists.counts + 2 * row)
    partial = gl.load(lists.counts + 2 * row + 1)
    at = gl.where(partial > 0, lists.width - 1, 0)
    return Cursor(word=gl.load(runs_of(lists, row) + at, mask=full + partial > 0, other=beyond), at=row * 0)


@gluon.jit
def tile_number(cursor):
    return (cursor.word & FIRST_MASK) + (cursor.at & COUNT_MASK)


@gluon.jit
def next_listed(cursor, lists, row, j, partial, count):
    """The place after that of a row's j-th tile; after the last comes the first. Read early: lists are in device memory."""
    last = j + 1 == count
    j = gl.where(last, 0, j + 1)
    restart = last | (j == partial)
    inside = ((cursor.at & COUNT_MASK) < ((cursor.word >> RUN_LENGTH) & COUNT_MASK)) & (restart == 0)
    at = gl.where(inside, cursor.at + 1, gl.where(restart, 0, (cursor.at | COUNT_MASK) + 1))
    run = at >> RUN_NUMBER
    where = runs_of(lists, row) + gl.where(j < partial, lists.width - 1 - run, run)
    return Cursor(word=gl.load(where, mask=(count > 1) & (inside == 0), other=cursor.word), at=at)


@gluon.jit
def make_words(STAGES: gl.constexpr, C: gl.constexpr):
    """Room for the words of a ring's tiles; () where there are no lists."""
    if C.LISTS is not None:
        return (gl.allocate_shared_memory(gl.int32, [STAGES, 1], WORDS),)
    else:
        return ()


@gluon.jit
def announce(words, at, cursor, partial):
    """Say which tile comes into a free stage; its barrier, on which this thread arrives next, makes it known."""
    word = tile_number(cursor) | (live_terms(cursor) << LIVE) | gl.where(partial, PARTIAL, 0)
    words.index(at).store(gl.full([1], word, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def announced(words, at):
    """The place of the tile that has landed in a stage: a run of its own."""
    word = gl.sum(words.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    return Cursor(word=word, at=word * 0)


@gluon.jit
def is_partial(cursor):
    """Of an announced tile."""
    return (cursor.word & PARTIAL) != 0


@gluon.jit
def ids_of(ids, stride, b, at, length):
    """Ids of the positions `at` of sequence b; positions past the last have any."""
    return gl.load(ids + place(b, b, (stride, None)) + at, mask=at < length, other=0)


@gluon.jit
def bit_words(lists, b, h, rows, word, len_rows, len_columns):
    """Words of 32 columns of a dense mask: keys at rows of queries, or by key queries at rows of keys; past the last, any."""
    rows = gl.minimum(rows, len_rows - 1)
    word = gl.minimum(word, (len_columns - 1) // 32)
    strides = lists.bits_strides
    base = lists.bits + place(b.to(gl.int64), h.to(gl.int64), (strides[0], strides[1]))
    return gl.load(base + (rows * strides[2] + word * strides[3]))


@gluon.jit
def term_bounds(term, rows, BY_KEY: gl.constexpr):
    """[first, past) of the keys that queries see under a term, lo <= k - q <= hi and start <= k < end; with BY_KEY of the queries
    that see keys. Nothing where past <= first."""
    lo = gl.load(term)
    hi = gl.load(term + 1)
    start = gl.load(term + 2)
    end = gl.load(term + 3)
    if BY_KEY:
        first = rows - gl.minimum(hi, FAR)
        past = rows + 1 - gl.maximum(lo, -FAR)
        return first, gl.where((rows >= start) & (rows < end), past, first)
    else:
        return gl.maximum(rows + lo, start), gl.minimum(rows + (hi + 1), end)


@gluon.jit
def live_terms(cursor):
    """The set of a tile's live terms; of an announced one also a bit beyond them."""
    return cursor.word >> LIVE


@gluon.jit
def same_document(q_ids, k_ids, C: gl.constexpr):
    if C.LISTS.ids == NOT_EQUAL:
        return q_ids != k_ids
    else:
        return q_ids == k_ids


@gluon.jit
def all_set(words, strides, b, h, first, length, COUNT: gl.constexpr):
    """Are all bits of the COUNT positions from `first` on set? Yes, where that is past the last one."""
    at = words + place(b, h, strides) + first // 32
    found = gl.load(at, mask=first < length, other=-1)
    for i in gl.static_range(1, COUNT // 32):
        found = found & gl.load(at + i, mask=first < length, other=-1)
    return found == -1
