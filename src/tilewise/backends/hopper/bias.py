"""A bias: a tensor that is added to the scores. Its tiles go from memory straight into the registers of the scores.

A thread of an accumulator holds pairs of neighbouring columns, so numbers of 16 bits with adjacent keys come two in a word. Loads
are issued before the product of scores is waited for. Tiles of the backward that hold keys are transposed: there a warp loads
8×8 numbers as words of two keys, and one instruction (movmatrix) makes them words of two queries.

With a bias scores are in natural units, since models write masks as the lowest finite number, which leaves fp32 when multiplied
by log2(e). A bias of -inf hides a key.
"""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, opaque
from tilewise.backends.hopper.dropout import accumulator_parts, counted, whole
from tilewise.backends.hopper.operands import accumulator
from tilewise.backends.hopper.ring import bias_ring, matrix, wait_full
from tilewise.backends.hopper.softmax import INF, LOG2E

MAX_SLACK = gl.constexpr(5.5)
"""As in `softmax`, in natural units: weights are at most 2**8."""


@gluon.constexpr_function
def is_paired(form):
    """Is the bias read in words of two keys?"""
    return form.endswith("x2")


@gluon.constexpr_function
def _unpack(form):
    if form.startswith("bf16"):
        return "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xFFFF0000; mov.b32 $1, t; }"
    return "{ .reg .b16 x, y; mov.b32 {x, y}, $2; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y; }"


@gluon.jit
def head_pointer(b, h, a):
    """Where the bias of a sequence and head begins."""
    return a.bias_ptr + (b.to(gl.int64) * a.bias_b + h.to(gl.int64) * a.bias_h)


@gluon.jit
def key_offset(k, a):
    """How far keys (a number or a vector) lie behind the first."""
    if a.bias_k is None:
        return k.to(gl.int64)
    else:
        return k.to(gl.int64) * a.bias_k


@gluon.jit
def load_by_row(work, row0, key0, a, N: gl.constexpr, WHOLE: gl.constexpr, C: gl.constexpr):
    """A tile [64 queries, N keys] as it stands in memory. Rows past the last are the last; keys past the last, where the tile is
    not WHOLE, are anything."""
    LAYOUT: gl.constexpr = accumulator_parts(N)
    head = head_pointer(work.b, work.h, a)
    if is_paired(C.BIAS):
        WORDS: gl.constexpr = gl.SliceLayout(3, LAYOUT)
        r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
        eight = gl.arange(0, N // 8, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
        lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
        q = gl.minimum(row0 + r, a.bias_rows - 1)[:, None, None]
        at = (head + q.to(gl.int64) * a.bias_q) + (key0 // 2 + lane)
        if WHOLE:
            return gl.load(at + eight * 4)
        else:
            return gl.load(at + eight * 4, mask=eight * 8 + gl.zeros_like(q) < a.bias_keys - key0 - 2 * lane)
    else:
        r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
        q = gl.minimum(row0 + r, a.bias_rows - 1)[:, None, None, None]
        column = counted(N // 8, 1, LAYOUT) * 8 + (counted(4, 2, LAYOUT) * 2 + counted(2, 3, LAYOUT))
        at = (head + q.to(gl.int64) * a.bias_q) + key_offset(key0, a)
        if a.bias_k is None:
            at = (at + (counted(4, 2, LAYOUT) * 2 + counted(2, 3, LAYOUT))) + counted(N // 8, 1, LAYOUT) * 8
        else:  # opaque: else all columns' places are kept in registers
            at = at + column * opaque(a.bias_k)
        if WHOLE:
            return gl.load(at)
        else:
            return gl.load(at, mask=column + gl.zeros_like(q) < a.bias_keys - key0)


@gluon.constexpr_function
def _blocks_by_key(m):
    """The layout of words [M / 8, 8 queries, 8, 4] of two keys each: a warp holds 16 keys in blocks of 8×8 numbers."""
    registers = [[0, 0, 1, 0], *([1 << i, 0, 0, 0] for i in range((m // 8).bit_length() - 1))]
    lanes = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 2, 0], [0, 0, 4, 0]], [], [m // 8, 8, 8, 4])


@gluon.jit
def load_by_column(b, h, m, k0, a, C: gl.constexpr):
    """A tile [64 keys, M queries], words already of two queries. What is past the last query or key is that of the last."""
    M: gl.constexpr = C.BLOCK_M
    head = head_pointer(b, h, a)
    if is_paired(C.BIAS):
        BLOCKS: gl.constexpr = _blocks_by_key(M)
        block = gl.arange(0, M // 8, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, BLOCKS))))[:, None, None, None]
        # within a tile rows lie less than 2³¹ words apart
        row = gl.minimum(block * 8 + counted(8, 1, BLOCKS), a.bias_rows - 1 - m)
        word = gl.minimum(k0 // 2 + (counted(8, 2, BLOCKS) * 4 + counted(4, 3, BLOCKS)), a.bias_keys // 2 - 1)
        words = gl.load((head + m.to(gl.int64) * a.bias_q + word) + row * a.bias_q)  # [M / 8, 8, 8, 4]: queries, then keys
        words = gl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
        )  # the same blocks, in each keys, then words of two queries
        LAYOUT: gl.constexpr = gl.SliceLayout(3, accumulator_parts(M))
        words = gl.reshape(gl.permute(words, (2, 1, 0, 3)), [64, M // 8, 4])
        return gl.convert_layout(words, LAYOUT, assert_trivial=True)
    else:
        PARTS: gl.constexpr = accumulator_parts(M)
        r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, PARTS))))
        k = gl.minimum(k0 + r, a.bias_keys - 1)[:, None, None, None]
        column = counted(M // 8, 1, PARTS) * 8 + (counted(4, 2, PARTS) * 2 + counted(2, 3, PARTS))
        row = gl.minimum(column, a.bias_rows - 1 - m)
        return gl.load((head + m.to(gl.int64) * a.bias_q + key_offset(k, a)) + row * opaque(a.bias_q))


@gluon.jit
def as_scores(loaded, N: gl.constexpr, C: gl.constexpr):
    """What was loaded as an accumulator [64, N] of fp32."""
    if is_paired(C.BIAS):
        ASM: gl.constexpr = _unpack(C.BIAS)
        even, odd = gl.inline_asm_elementwise(
            ASM, "=f,=f,r", [loaded], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )
        return whole(gl.join(even, odd), N)
    else:
        return whole(loaded.to(gl.float32), N)


@gluon.jit
def add_by_row(s_tile, work, row0, key0, a, WHOLE: gl.constexpr, C: gl.constexpr):
    """Scores with a bias that is loaded only now, 32 keys at a time: what does not come in words finds no registers before."""
    N: gl.constexpr = s_tile.type.shape[1]
    if N > 32:
        LAYOUT: gl.constexpr = s_tile.type.layout
        HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N // 2, 16])
        left, right = gl.split(gl.permute(gl.reshape(s_tile, [64, 2, N // 2]), (0, 2, 1)))
        left = gl.convert_layout(left, HALF, assert_trivial=True)
        right = gl.convert_layout(right, HALF, assert_trivial=True)
        left = add_by_row(left, work, row0, key0, a, WHOLE, C)
        right = add_by_row(right, work, row0, key0 + N // 2, a, WHOLE, C)
        both = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [64, N])
        return gl.convert_layout(both, LAYOUT, assert_trivial=True)
    else:
        return s_tile + as_scores(load_by_row(work, row0, key0, a, N, WHOLE, C), N, C)


@gluon.jit
def store_gradient_by_row(ds_tile, work, row0, key0, a, C: gl.constexpr):
    """dS of a tile [64 queries, N keys], each of which comes once: stored, or added up where the bias is broadcast."""
    N: gl.constexpr = C.BLOCK_N
    LAYOUT: gl.constexpr = accumulator_parts(N)
    ds_parts = gl.convert_layout(gl.reshape(ds_tile, [64, N // 8, 4, 2]), LAYOUT, assert_trivial=True)
    q = row0 + gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[:, None, None, None]
    # rows begin at even places and have room for an even number: two numbers are written at once
    eight = counted(N // 8, 1, LAYOUT) * 8
    pair = counted(2, 3, LAYOUT)
    two = counted(4, 2, LAYOUT) * 2
    ok = (q < work.len_q) & (eight + gl.zeros_like(pair) < work.len_k - key0 - two)
    head = work.b.to(gl.int64) * a.dbias_b + work.h.to(gl.int64) * a.dbias_h
    at = a.dbias_ptr + (head + q.to(gl.int64) * a.dbias_q + (key0 // 2 + counted(4, 2, LAYOUT))) * 2
    if C.DBIAS == "store":
        gl.store((at + eight) + pair, ds_parts.to(a.dbias_ptr.dtype.element_ty), mask=ok)
    elif a.dbias_k is None:
        gl.atomic_add((at + eight) + pair, ds_parts, mask=ok, sem="relaxed")
    else:  # all keys share a number
        at = a.dbias_ptr + (head + q.to(gl.int64) * a.dbias_q) * 2
        gl.atomic_add(at + (eight + two + pair) * a.dbias_k, ds_parts, mask=ok, sem="relaxed")


@gluon.jit
def raise_flag(x_tile, a, C: gl.constexpr):
    """If something in a result is infinite or NaN: perhaps because of what the bias hides, see hidden.py."""
    if C.BIAS != "":
        row = gl.sum(x_tile * 0.0, 1)
        gl.store(a.bias_flag + gl.arange(0, 64, row.type.layout) * 0, row.to(gl.int32) * 0 + 1, mask=row != 0.0)


@gluon.jit
def natural_softmax_step(s_tile, m):
    """`softmax_step` of scores in natural units; a row may have seen nothing yet."""
    top = gl.max(s_tile, 1)
    new_m = gl.where(top > m + MAX_SLACK, top, m)
    shift = gl.where(new_m == -INF, 0.0, new_m)
    rescale = gl.exp2((m - shift) * LOG2E)
    p_tile = gl.exp2((s_tile - shift[:, None]) * LOG2E)  # [64, N]
    return p_tile, new_m, rescale, top


@gluon.jit
def load_bias(rings, n, C: gl.constexpr):
    """A bias's n-th tile from shared memory, as its numbers stand there."""
    LAYOUT: gl.constexpr = accumulator(C.BLOCK_N)
    ring = bias_ring(rings)
    wait_full(ring, n)
    return matrix(ring, n).load(LAYOUT)


@gluon.constexpr_function
def _unpack_pair(dtype):
    if dtype == gl.bfloat16:
        both = "mov.b32 w, {$2, $3}; shl.b32 t, w, 16; mov.b32 $0, t; and.b32 t, w, 0xFFFF0000; mov.b32 $1, t;"
        return "{ .reg .b32 w, t; " + both + " }"
    return "{ cvt.f32.f16 $0, $2; cvt.f32.f16 $1, $3; }"


@gluon.jit
def unpacked(bias, C: gl.constexpr):
    """A tile [64, N] of 16-bit numbers as fp32: one instruction each, of words that the compiler would take apart first."""
    ASM: gl.constexpr = _unpack_pair(bias.dtype)
    LAYOUT: gl.constexpr = accumulator(C.BLOCK_N)
    even, odd = gl.split(gl.reshape(bias.to(gl.int16, bitcast=True), [64, C.BLOCK_N // 2, 2]))
    even, odd = gl.inline_asm_elementwise(
        ASM, "=f,=f,h,h", [even, odd], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [64, C.BLOCK_N]), LAYOUT, assert_trivial=True)
