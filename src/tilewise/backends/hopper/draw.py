"""Dropout apart from the softmax: a warpgroup that only makes bits, which of a tile's weights are kept, ahead of their use.

The mask is that of `numerics.philox`: Philox4x32-10 of (k // 4, q, head, sequence), a word for each of four neighbouring keys.
Its products all go through one pipe, four cycles each, and wait for one another; beside a softmax and products of matrices in
one warpgroup they would also wait for these. So warps of their own make them, several calls at a time, and leave words of 32 bits
in a ring in shared memory: bit k % 32 of word k // 32 of a row is set where key k of the tile is kept. What a call shares with
others is computed once: the first two rounds of a row for all keys, the first three of a four of keys for a thread's rows.

Who uses them has weights as words of two 16-bit numbers (`operands.packed`). A thread's columns are 8 i + 2 lane + pair, so after
two shifts, for even and odd columns, the bits of its pairs are the signs of bytes, of which a permutation makes masks.
"""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, mbarrier
from tilewise.backends.hopper.dropout import counted
from tilewise.backends.hopper.ring import Ring, make_barriers, phase, release, stage, wait_full
from tilewise.backends.hopper.work_tile import locate, tile_at

FIRST, THIRD = "0xD2511F53", "0xCD9E8D57"
"""What these numbers of a counter are multiplied by in each round."""
FOURS = gl.constexpr(8)
"""Calls in a word."""


@gluon.jit
def make_drawn(C: gl.constexpr):
    """The parts of a ring of bits where there is one."""
    if C.DRAWERS > 0:
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        words = gl.allocate_shared_memory(gl.int32, [C.DRAW_STAGES, C.BLOCK_M, C.BLOCK_N // 32], LAYOUT)
        return (words, make_barriers(C.DRAW_STAGES, 1), make_barriers(C.DRAW_STAGES, C.WARPGROUPS))
    else:
        return ()


@gluon.jit
def drawn_ring(rings):
    return Ring(tiles=rings.drawn[0], full=rings.drawn[1], empty=rings.drawn[2])


@gluon.constexpr_function
def words_layout(m, n):
    """The layout of words [m, n] whose neighbours are neighbouring lanes'; a thread has a column of several rows."""
    order = [[0, 1 << i] for i in range(n.bit_length() - 1)] + [[1 << i, 0] for i in range(m.bit_length() - 1)]
    return gl.DistributedLinearLayout(order[7:], order[:5], order[5:7], [], [m, n])


@gluon.constexpr_function
def round_key(word, turn):
    """What is added to a word of the key before a round, as a number with a sign."""
    x = turn * (0x9E3779B9, 0xBB67AE85)[word] & 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x


@gluon.constexpr_function
def _wide(third):
    factor = THIRD if third else FIRST
    return f"{{ .reg .b64 wide; mul.wide.u32 wide, $2, {factor}; mov.b64 {{$0, $1}}, wide; }}"


@gluon.jit
def wide(x, IS_THIRD: gl.constexpr):
    """The halves of a number's product in a round, the low one first."""
    ASM: gl.constexpr = _wide(IS_THIRD)
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.constexpr_function
def drawing(rows, fours):
    """Calls of so many rows and fours of keys, of whose bits the rows' words take in 4 each, from the left. See `draw_words`."""
    words, high, low, four, below, *key = ([f"${rows * (1 + j) + r}" for r in range(rows)] for j in range(24))
    third, second, *key = (one[0] for one in key)
    lines = [".reg .b32 drawn, t, u;", ".reg .b64 wide, other;", ".reg .pred kept;"]
    lines += [f".reg .b32 {', '.join(f'f{i}_{e}' for e in range(fours))};" for i in range(4)]
    calls = [(e, r) for e in range(fours) for r in range(rows)]
    lines += [f".reg .b32 {', '.join(f'c{i}_{e}_{r}' for e, r in calls)};" for i in range(4)]
    for e in range(fours):
        lines += [
            f"add.u32 drawn, {four[0]}, {e};",
            f"mul.wide.u32 wide, drawn, {FIRST};", f"mov.b64 {{f0_{e}, t}}, wide;",
            f"xor.b32 t, t, {third};",
            f"mul.wide.u32 wide, t, {THIRD};", f"mov.b64 {{f1_{e}, t}}, wide;",
            f"xor.b32 t, t, {second};",
            f"mul.wide.u32 wide, t, {FIRST};", f"mov.b64 {{f3_{e}, f2_{e}}}, wide;",
            f"xor.b32 f0_{e}, f0_{e}, {key[0]};", f"xor.b32 f1_{e}, f1_{e}, {key[1]};", f"xor.b32 f2_{e}, f2_{e}, {key[2]};",
        ]  # fmt: skip
    for e, r in calls:
        lines += [
            f"xor.b32 t, {high[r]}, f0_{e};",
            f"mul.wide.u32 wide, t, {THIRD};", f"mov.b64 {{c1_{e}_{r}, t}}, wide;",
            f"xor.b32 c0_{e}_{r}, t, f1_{e};",
            f"xor.b32 c2_{e}_{r}, {low[r]}, f2_{e};", f"mov.b32 c3_{e}_{r}, f3_{e};",
        ]  # fmt: skip
    for turn in range(7):
        for e, r in calls:
            c0, c1, c2, c3 = (f"c{i}_{e}_{r}" for i in range(4))
            lines += [
                f"mul.wide.u32 wide, {c0}, {FIRST};", f"mul.wide.u32 other, {c2}, {THIRD};",
                "mov.b64 {t, u}, other;", f"lop3.b32 {c0}, u, {c1}, {key[3 + 2 * turn]}, 0x96;", f"mov.b32 {c1}, t;",
                "mov.b64 {t, u}, wide;", f"lop3.b32 {c2}, u, {c3}, {key[4 + 2 * turn]}, 0x96;", f"mov.b32 {c3}, t;",
            ]  # fmt: skip
    lines += [f"shr.u32 ${r}, {words[r]}, {4 * fours};" for r in range(rows)]
    for e in range(fours):
        for i in range(4):
            for r in range(rows):
                bit = 1 << (32 - 4 * fours + 4 * e + i)
                lines += [f"setp.ge.u32 kept, c{i}_{e}_{r}, {below[r]};", f"@kept or.b32 ${r}, ${r}, {bit:#x};"]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def drawing_operands(rows):
    return ",".join(["=&r"] * rows + ["r"] * 24 * rows)


@gluon.jit
def draw_words(row_low, row_high, four, third, second, low, high, a, AT_ONCE: gl.constexpr):
    """Words of bits. `row_low` and `row_high`: halves of a row's product in the second round. `four`: the first of a word's
    fours of keys. `third` and `second`: what the numbers of fours are xored with in the first and second round."""
    ROWS: gl.constexpr = row_low.type.shape[0] // 32 * row_low.type.shape[1] // 4
    ASM: gl.constexpr = drawing(ROWS, AT_ONCE)
    OPERANDS: gl.constexpr = drawing_operands(ROWS)
    words = gl.zeros_like(row_low)
    for e in range(0, FOURS, AT_ONCE):
        words = gl.inline_asm_elementwise(
            ASM, OPERANDS,
            [
                words, row_high, row_low, four + e, a.drop_below, third, second,
                high + round_key(1, 1), low + round_key(0, 2), high + round_key(1, 2),
                low + round_key(0, 3), high + round_key(1, 3), low + round_key(0, 4), high + round_key(1, 4),
                low + round_key(0, 5), high + round_key(1, 5), low + round_key(0, 6), high + round_key(1, 6),
                low + round_key(0, 7), high + round_key(1, 7), low + round_key(0, 8), high + round_key(1, 8),
                low + round_key(0, 9), high + round_key(1, 9),
            ],
            dtype=gl.int32, is_pure=True, pack=ROWS,
        )  # fmt: skip
    return words


@gluon.jit
def draw(rings, a, PART: gl.constexpr, C: gl.constexpr):
    """Bits of all key tiles of all work tiles of this program, in the order in which keys are loaded; one of PART of them."""
    M: gl.constexpr = C.BLOCK_M
    WORDS: gl.constexpr = C.BLOCK_N // 32
    LAYOUT: gl.constexpr = words_layout(M, WORDS)
    ring = drawn_ring(rings)
    low = gl.load(a.seed_ptr)
    high = gl.load(a.seed_ptr + 1)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))[None, :]
    n = 0  # key tiles so far
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        work, _ = locate(a, t, C)
        i += 1
        t = tile_at(a, i)
        head_low, head_high = wide(work.h, True)
        q = work.m0 + gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
        row_low, row_high = wide((q ^ (head_high ^ low))[:, None] ^ (word * 0), False)
        for j in range(work.count):
            if C.DRAWERS == 1 or n % C.DRAWERS == PART:
                four = (work.last - 1 - j) * (C.BLOCK_N // 4) + FOURS * word + row_low * 0
                words = draw_words(
                    row_low, row_high, four, work.b ^ high, head_low ^ (low + round_key(0, 1)), low, high, a, C.DRAW_AT_ONCE
                )
                at = stage(ring, n)
                mbarrier.wait(ring.empty.index(at), phase(ring, n) ^ 1)
                ring.tiles.index(at).store(words)
                mbarrier.arrive(ring.full.index(at), count=1)
            n += 1


@gluon.jit
def drop_drawn(words, rings, n, WG: gl.constexpr):
    """Weights [64, N / 2] in words of two, with 0 where the n-th tile's bits say that they are dropped."""
    PAIRS: gl.constexpr = words.type.shape[1]
    ring = drawn_ring(rings)
    parts = gl.reshape(words, [64, PAIRS // 16, 4, 4])
    LAYOUT: gl.constexpr = parts.type.layout
    BITS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))
    wait_full(ring, n)
    bits = ring.tiles.index(stage(ring, n)).slice(64 * WG, 64, dim=0).load(BITS)  # [64, N / 32]
    release(ring, n)
    byte, lane = counted(4, 2, LAYOUT), counted(4, 3, LAYOUT)
    bits = bits[:, :, None, None]
    even, odd = bits << (7 - 2 * lane), bits << (6 - 2 * lane)
    signs = 0xCC88 + 0x1111 * byte  # of a byte of the one, twice, and of the other
    kept = gl.inline_asm_elementwise(
        "{ .reg .b32 both; prmt.b32 both, $2, $3, $4; and.b32 $0, $1, both; }", "=r,r,r,r,r",
        [parts, even, odd, signs], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.reshape(kept, [64, PAIRS]), words.type.layout, assert_trivial=True)


@gluon.jit
def skip_drawn(rings, n, skip, WG: gl.constexpr, C: gl.constexpr):
    """Release the first tiles' bits unread, as `consumer.skip_tiles` does."""
    if C.DRAWERS > 0 and C.BAND and WG + 1 < C.WARPGROUPS:
        for i in range(skip):
            wait_full(drawn_ring(rings), n + i)
            release(drawn_ring(rings), n + i)
