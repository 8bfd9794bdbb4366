"""Keys of a tile in an order in which each thread of an accumulator holds four neighbouring ones: those of one call of Philox.

A thread holds columns 8 i + 2 lane + pair. So column c of N stands for key 4 (c % (N / 2) // 2) + 2 (c // (N / 2)) + c % 2: the
first half of the columns are the first two keys of each four, the second half the other two. Loads bring keys and values in that
order: to a tensor map fours are a side of their own, and a tile comes in two boxes of N / 4 pairs for each 64 columns. Weights
meet their values again, since both are in the same order; only masks have to know. So each thread makes the calls for its own
weights, whose words are compared and used at once: no bits are packed, exchanged between lanes and unpacked.
"""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, mbarrier, tma_load
from tilewise.backends.hopper.dropout import philox_rounds
from tilewise.backends.hopper.ring import Ring, make_barriers, phase, stage

UNIT = gl.constexpr(64)
"""Columns of a box: 128 bytes, the width of the swizzle."""


@gluon.constexpr_function
def whole_layout(n, width, dtype):
    return gl.NVMMASharedLayout.get_default_for([1, 1, n, width], dtype)


@gluon.jit
def make_quad_ring(desc, STAGES: gl.constexpr, WIDTH: gl.constexpr, READERS: gl.constexpr):
    """A ring for tiles of keys or values [N, WIDTH]."""
    N: gl.constexpr = 4 * desc.block_type.shape[2]
    LAYOUT: gl.constexpr = whole_layout(N, WIDTH, desc.dtype)
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, 1, 1, N, WIDTH], LAYOUT)
    return Ring(tiles=tiles, full=make_barriers(STAGES, 1), empty=make_barriers(STAGES, READERS))


@gluon.jit
def fill_quads(ring, desc, n, b, h, row):
    """Load the n-th tile, keys from `row` on, once its stage is free."""
    WIDTH: gl.constexpr = ring.tiles.type.shape[4]
    STAGES: gl.constexpr = ring.tiles.type.shape[0]
    BOXES: gl.constexpr = 2 * (WIDTH // UNIT)
    at = stage(ring, n)
    mbarrier.wait(ring.empty.index(at), phase(ring, n) ^ 1)
    mbarrier.expect(ring.full.index(at), BOXES * desc.block_type.nbytes)
    FOURS: gl.constexpr = desc.block_type.shape[2]
    boxes = ring.tiles._reinterpret(desc.dtype, [STAGES * BOXES, 1, 1, FOURS, 2, UNIT], desc.layout)
    for i in gl.static_range(BOXES):
        place = [b, h, row // 4, 2 * (i % 2), UNIT * (i // 2)]
        tma_load(desc, place, ring.full.index(at), boxes.index(at * BOXES + i))


@gluon.jit
def key_of_column(c, N: gl.constexpr):
    """Which key of its tile a column stands for."""
    return 4 * ((c % (N // 2)) // 2) + 2 * (c // (N // 2)) + c % 2


@gluon.jit
def _bits_below(x, lane, HALF: gl.constexpr, BITS: gl.constexpr):
    """How many of a lane's columns of one half stand for keys below x, which counts from the tile's first key."""
    y = x - 4 * lane - 2 * HALF
    return gl.minimum(gl.maximum(2 * (y >> 4) + gl.minimum(y & 15, 2), 0), BITS)


@gluon.jit
def quad_words(lo, hi, like, N: gl.constexpr):
    """As `interval_words`, of keys in this order."""
    BITS: gl.constexpr = N // 8
    lane = gl.arange(0, 4, gl.SliceLayout(0, like.type.layout))[None, :]
    found = like
    for half in gl.static_range(2):
        first = _bits_below(lo[:, None], lane, half, BITS)
        count = gl.maximum(_bits_below(hi[:, None], lane, half, BITS) - first, 0)
        found = found | gl.inline_asm_elementwise(
            "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", [first + half * BITS, count], dtype=gl.int32, is_pure=True, pack=1
        )
    return found


@gluon.constexpr_function
def _drop(n):
    """n calls, each with four numbers ($0.., $n.., … from $4n..): 0 where the call's word is below the threshold."""
    arg = [[f"${n * (4 + j) + e}" for e in range(n)] for j in range(11)]
    lines = philox_rounds(n, arg[4:10])
    for e in range(n):
        for i in range(4):
            lines += [f"setp.ge.u32 kept, c{i}_{e}, {arg[10][e]};", f"selp.f32 ${n * i + e}, {arg[i][e]}, 0f00000000, kept;"]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _drop_operands(n):
    return ",".join(["=&f"] * 4 * n + ["f"] * 4 * n + ["r"] * 7 * n)


@gluon.jit
def drop_quads(p_tile, row0, key0, b, h, a, C: gl.constexpr):
    """A tile [64, N] of weights with 0 where they are dropped."""
    N: gl.constexpr = C.BLOCK_N
    LAYOUT: gl.constexpr = p_tile.type.layout
    CALLS: gl.constexpr = 4 if C.BLOCK_DV == 128 or C.BLOCK_N == 64 else 8
    ASM: gl.constexpr = _drop(CALLS)
    OPERANDS: gl.constexpr = _drop_operands(CALLS)
    parts = gl.permute(gl.reshape(p_tile, [64, 2, N // 16, 4, 2]), (0, 2, 3, 1, 4))
    even, odd = gl.split(parts)  # [64, N / 16, 4, 2]
    x0, x2 = gl.split(even)  # [64, N / 16, 4]
    x1, x3 = gl.split(odd)
    PARTS: gl.constexpr = x0.type.layout
    q = row0 + gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
    eight = gl.arange(0, N // 16, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    fours = (key0 // 4 + lane)[None, None, :] + 4 * eight[None, :, None]
    low = gl.load(a.seed_ptr)
    high = gl.load(a.seed_ptr + 1)
    x0, x1, x2, x3 = gl.inline_asm_elementwise(
        ASM, OPERANDS, [x0, x1, x2, x3, fours, q[:, None, None], h, b, low, high, a.drop_below],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=CALLS,
    )  # fmt: skip
    parts = gl.join(gl.join(x0, x2), gl.join(x1, x3))  # [64, N / 16, 4, 2, 2]
    whole = gl.reshape(gl.permute(parts, (0, 3, 1, 2, 4)), [64, N])
    return gl.convert_layout(whole, LAYOUT, assert_trivial=True)
