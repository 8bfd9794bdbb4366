"""Which columns of a tile each row sees, as words: a thread holds N / 4 of a row's N columns, at most 32, and has a bit for each.

A thread's columns are 8 i + 2 lane + pair, the order of an accumulator's registers; bit 2 i + pair stands for them. Words are
made while the scores are computed and take one register a row. Then each score costs a test of a constant bit and a selection.
Both are written in assembly, one after the other: of 64 tests in a row ptxas packs the results into registers and unpacks them.
"""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon


@gluon.jit
def by_lane(x_tile):
    """[64, N] as [64, N / 8, 4, 2]: the second and the last are registers of a thread."""
    N: gl.constexpr = x_tile.type.shape[1]
    return gl.reshape(x_tile, [64, N // 8, 4, 2])


@gluon.jit
def bit_numbers(like):
    """The bit of each register, in the layout of a tile by lane."""
    GROUPS: gl.constexpr = like.type.shape[1]
    GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, like.type.layout)))
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout)))
    group = gl.arange(0, GROUPS, GROUP)
    pair = gl.arange(0, 2, PAIR)
    return 2 * group[None, :, None, None] + pair[None, None, None, :]


@gluon.jit
def words_of(ok_tile):
    """Words [64, 4] of a tile of truth values."""
    parts = by_lane(ok_tile.to(gl.int32))
    return gl.sum(gl.sum(parts << bit_numbers(parts), 3), 1)


@gluon.constexpr_function
def _select(n, other):
    """n numbers of a thread ($0.. from $n..) in alternate pairs of its two rows, where bits of $2n and $(2n + 2) are set."""
    lines = [".reg .pred seen;", ".reg .b32 bit;"]
    for i in range(n):
        lines += [
            f"and.b32 bit, ${2 * n + (i & 2)}, {1 << (i // 4 * 2 + (i & 1)):#x};",
            "setp.ne.u32 seen, bit, 0;",
            f"selp.f32 ${i}, ${n + i}, {'0fFF800000' if other else '0f00000000'}, seen;",
        ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _select_operands(n):
    return ",".join(["=f"] * n + ["f"] * n + ["r"] * n)


@gluon.jit
def where_set(words, x_tile, OTHER: gl.constexpr):
    """x where its bit is set, else OTHER: -inf or 0."""
    LAYOUT: gl.constexpr = x_tile.type.layout
    N: gl.constexpr = x_tile.type.shape[1]
    ASM: gl.constexpr = _select(N // 2, OTHER != 0.0)
    OPERANDS: gl.constexpr = _select_operands(N // 2)
    parts = by_lane(x_tile)
    ok = words[:, None, :, None]
    found = gl.inline_asm_elementwise(ASM, OPERANDS, [parts, ok], dtype=gl.float32, is_pure=True, pack=N // 2)
    return gl.convert_layout(found.reshape([64, N]), LAYOUT, assert_trivial=True)


@gluon.jit
def lanes(words):
    """The first column of each lane [1, 4]."""
    WORDS: gl.constexpr = words.type.layout
    return 2 * gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]


@gluon.jit
def rows_of_words(words, first):
    """Positions [64] of a tile's rows from `first` on."""
    WORDS: gl.constexpr = words.type.layout
    return first + gl.arange(0, 64, gl.SliceLayout(1, WORDS))


@gluon.jit
def no_words(N: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [64, 4] of 0, whose layout others take."""
    return words_of(gl.zeros([64, N], gl.int32, LAYOUT))


@gluon.jit
def _bits_below(x):
    """How many of a lane's columns, which may be any number, are below x, which counts from the lane's first."""
    return 2 * (x >> 3) + gl.minimum(x & 7, 2)


@gluon.jit
def interval_words(lo, hi, like):
    """Words of the columns lo <= c < hi, [64] numbers that count from the tile's first column. Bits past the last column's may
    be set too."""
    first = gl.maximum(_bits_below(lo[:, None] - lanes(like)), 0)
    count = gl.maximum(_bits_below(hi[:, None] - lanes(like)) - first, 0)
    return gl.inline_asm_elementwise(
        "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", [first, count], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def from_natural(word, like):
    """8 bits of each lane from words [64] of 32 neighbouring columns."""
    x = (word[:, None] >> lanes(like)) & 0x03030303
    x = (x | (x >> 6)) & 0x000F000F
    return (x | (x >> 12)) & 0xFF
