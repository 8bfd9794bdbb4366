"""One warpgroup, one tile of keys: products, scores, weights.

    over the keys seen so far:   o = Σ exp2(x - m) v,   l = Σ exp2(x - m),   m near max x        (x: scores in units of log 2)

Two products are in flight: S(n) = Q·K(n)ᵀ is issued, then O += P(n-1)·V(n-1), and while the second runs the softmax of the first
is computed. So o lags l and m by one tile, whose weights wait in p. That goes on from one tile of queries to the next: the first
scores of the next are weighed while the last product of this one runs (`turn`).
"""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.fade import faded
from tilewise.backends.hopper.ring import Ring, await_tile, matrix, release
from tilewise.backends.hopper.shim import aggregate, named_arrive, named_sync
from tilewise.backends.hopper.softmax import INF, lane_sum, masked, scores, unit_of, weigh


@aggregate
class Running:
    """What a warpgroup carries from one tile of keys to the next."""

    o: gl.tensor  # [64, DV] fp32
    p: gl.tensor  # [64, N / 2] words of two weights not yet in o
    m: gl.tensor  # [64]
    l: gl.tensor  # [64, 4], partial sums by lane
    fade: gl.tensor  # [64], what o is still to be multiplied by

    @gluon.constexpr_function
    def __init__(self, o, p, m, l, fade):
        self.o = o
        self.p = p
        self.m = m
        self.l = l
        self.fade = fade


@gluon.constexpr_function
def accumulator(n):
    """The layout of a warpgroup's [64, n] product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def left_operand(n):
    """The layout of the left operand of a [64, n] product in registers: for P·V those of S."""
    return gl.DotOperandLayout(0, accumulator(n), 2)


@aggregate
class Queries:
    """A warpgroup's queries: all columns in shared memory, the first of them in registers too."""

    ring: Ring
    n: gl.tensor  # their number in the ring
    tile: gl.shared_memory_descriptor  # [64, D]
    held: gl.tuple  # of [64, width], left operands

    @gluon.constexpr_function
    def __init__(self, ring, n, tile, held):
        self.ring = ring
        self.n = n
        self.tile = tile
        self.held = held


@gluon.constexpr_function
def spans(first, last):
    """Columns [first, last) as (first, width), the widths powers of two that divide their first."""
    parts = []
    while first < last:
        width = 1 << (last - first).bit_length() - 1
        width = min(width, first & -first) if first else width
        parts.append((first, width))
        first += width
    return parts


@gluon.constexpr_function
def _pack(dtype):
    """Two fp32 as one word of two 16-bit numbers, the first in its low half."""
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def packed(p_tile, dtype: gl.constexpr):
    """Weights in 16 bits, two in a word [64, N / 2]. Loops carry words: 16-bit numbers would be taken apart and put together
    again in every step."""
    ASM: gl.constexpr = _pack(dtype)
    N: gl.constexpr = p_tile.type.shape[1]
    even, odd = gl.split(gl.reshape(p_tile, [64, N // 2, 2]))
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_operand(words, dtype: gl.constexpr, C: gl.constexpr):
    """Packed weights as the left operand of a product."""
    N: gl.constexpr = C.BLOCK_N
    LAYOUT: gl.constexpr = left_operand(C.BLOCK_DV)
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    p_tile = gl.reshape(gl.join(even, odd), [64, N]).to(dtype, bitcast=True)
    return gl.convert_layout(p_tile, LAYOUT, assert_trivial=True)


@gluon.jit
def rows_of(x, like):
    """A vector over rows in the layout of the rows of `like`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)[:, None]


@gluon.jit
def columns(tile, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Columns [FIRST, FIRST + WIDTH) of a matrix in shared memory."""
    if tile.type.shape[1] == WIDTH:
        return tile
    else:
        return tile.slice(FIRST, WIDTH, dim=1)


@gluon.jit
def hold(q_tile, C: gl.constexpr):
    """The first columns of the queries from shared memory to registers."""
    LAYOUT: gl.constexpr = left_operand(C.BLOCK_N)
    SPANS: gl.constexpr = spans(0, C.Q_HELD)
    held = ()
    for i in gl.static_range(len(SPANS)):
        held += (columns(q_tile, SPANS[i][0], SPANS[i][1]).load(LAYOUT),)
    return held


@gluon.jit
def issue_scores(q, k_ring, n, C: gl.constexpr):
    """S(n) on its way: a sum of products over the columns, those that registers hold first."""
    N: gl.constexpr = C.BLOCK_N
    S_LAYOUT: gl.constexpr = accumulator(N)
    HELD: gl.constexpr = len(q.held)
    SPANS: gl.constexpr = spans(0, C.Q_HELD) + spans(C.Q_HELD, C.BLOCK_D) if HELD > 0 else spans(0, C.BLOCK_D)
    token = gl.zeros([64, N], gl.float32, S_LAYOUT)
    k_tile = matrix(k_ring, n)
    for i in gl.static_range(len(SPANS)):
        keys = columns(k_tile, SPANS[i][0], SPANS[i][1]).permute((1, 0))
        if i < HELD:
            token = warpgroup_mma(q.held[i], keys, token, use_acc=i > 0, is_async=True)
        else:
            part = columns(q.tile, SPANS[i][0], SPANS[i][1])
            token = warpgroup_mma(part, keys, token, use_acc=i > 0, is_async=True)
    return token


@gluon.jit
def first_weights(s_tile, band, row0, key0, a, C: gl.constexpr):
    """Weights, maximum and sums of a tile of queries' first tile of keys."""
    S_LAYOUT: gl.constexpr = s_tile.type.layout
    s_tile = scores(s_tile, a, C)
    if C.TERMS > 0 or C.VARLEN or C.TAIL:
        s_tile = masked(s_tile, band, row0, key0, C)
    m = gl.full([64], -INF, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    p_tile, m, _ = weigh(s_tile, m, unit_of(a, C), True)
    return p_tile, m, lane_sum(p_tile)


@gluon.jit
def begin(q, k_ring, n, band, row0, key0, a, C: gl.constexpr):
    """The first tile of keys of a program's first tile of queries: nothing is in flight yet."""
    DV: gl.constexpr = C.BLOCK_DV
    O_LAYOUT: gl.constexpr = accumulator(DV)
    await_tile(k_ring, n)
    s_tile = warpgroup_mma_wait(0, deps=[issue_scores(q, k_ring, n, C)])  # [64, N]
    release(k_ring, n)
    p_tile, m, l = first_weights(s_tile, band, row0, key0, a, C)
    o_tile = gl.zeros([64, DV], gl.float32, O_LAYOUT)
    return Running(o_tile, packed(p_tile, k_ring.tiles.dtype), m, l, gl.full_like(m, 1.0))


@gluon.jit
def issue(x, q, k_ring, n, v_ring, before, WG: gl.constexpr, C: gl.constexpr):
    """S(n), and the product with the values of the tile before it, on their way."""
    if C.PINGPONG:
        named_sync(14 + WG, 256)
    s_token = issue_scores(q, k_ring, n, C)
    await_tile(v_ring, before)
    p_tile = as_operand(x.p, v_ring.tiles.dtype, C)
    o_tile = faded(x.o, rows_of(x.fade, x.o), C) if C.LATE else x.o
    o_token = warpgroup_mma(p_tile, matrix(v_ring, before), o_tile, is_async=True)
    if C.PINGPONG:
        named_arrive(15 - WG, 256)
    return s_token, o_token, p_tile


@gluon.jit
def step(x, q, k_ring, v_ring, n, more, band, row0, key0, a, MASKED: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Tile n of keys, which has landed; `more`: another follows."""
    s_token, o_token, old = issue(x, q, k_ring, n, v_ring, n - 1, WG, C)
    s_tile = warpgroup_mma_wait(1, deps=[s_token])  # [64, N]
    release(k_ring, n)
    if C.Q_EARLY:
        release(q.ring, q.n, not more)
    s_tile = scores(s_tile, a, C)
    if MASKED:
        s_tile = masked(s_tile, band, row0, key0, C)
    p_tile, m, fade = weigh(s_tile, x.m, unit_of(a, C), MASKED)
    added = lane_sum(p_tile)
    l = x.l * rows_of(fade, added) + added
    # The wait for the next tile of keys is a loop, hence the boundary of a basic block: without one ptxas moves all of the
    # softmax below the wait for P·V, and nothing overlaps. Only branches that all threads take alike may stand here.
    await_tile(k_ring, n + 1, more)
    o_tile, _ = warpgroup_mma_wait(0, deps=[o_token, old])
    release(v_ring, n - 1)
    if not C.LATE:
        o_tile = o_tile * rows_of(fade, o_tile)
    return Running(o_tile, packed(p_tile, k_ring.tiles.dtype), m, l, fade)


@gluon.jit
def turn(x, q, k_ring, n, v_ring, before, band, row0, key0, a, WG: gl.constexpr, C: gl.constexpr):
    """From one tile of queries to the next, whose first tile of keys is n: (the state of the next, the output of this one)."""
    DV: gl.constexpr = C.BLOCK_DV
    O_LAYOUT: gl.constexpr = accumulator(DV)
    s_token, o_token, old = issue(x, q, k_ring, n, v_ring, before, WG, C)
    s_tile = warpgroup_mma_wait(1, deps=[s_token])  # [64, N]
    release(k_ring, n)
    p_tile, m, l = first_weights(s_tile, band, row0, key0, a, C)
    # the queries are there: a boundary as in `step`. The wait for the next keys stands behind the release of these values,
    # for which the loads of them may wait
    await_tile(q.ring, q.n)
    o_tile, _ = warpgroup_mma_wait(0, deps=[o_token, old])
    release(v_ring, before)
    none = gl.zeros([64, DV], gl.float32, O_LAYOUT)
    return Running(none, packed(p_tile, k_ring.tiles.dtype), m, l, gl.full_like(m, 1.0)), o_tile


@gluon.jit
def end(x, v_ring, n, C: gl.constexpr):
    """The output of a program's last tile of queries, whose last tile of values is n."""
    await_tile(v_ring, n)
    p_tile = as_operand(x.p, v_ring.tiles.dtype, C)
    o_tile = faded(x.o, rows_of(x.fade, x.o), C) if C.LATE else x.o
    o_tile = warpgroup_mma_wait(0, deps=[warpgroup_mma(p_tile, matrix(v_ring, n), o_tile, is_async=True)])
    release(v_ring, n)
    return o_tile
