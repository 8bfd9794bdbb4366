"""The online softmax of a tile without its maximum: weights relative to the m that is there, unless their sum asks for more.

m only has to be near the running maximum (`softmax_step`), and a sum of weights tells how near: while a sum of four is below
2**8, so is every weight. A step sums anyway, so it looks at these. A warp of which a row has a larger one, or has seen no key
before, or holds a NaN, then weighs once more, and m is raised as ever: for a row, whatever the others do. That spares most steps
a comparison for each score, and the wait for the maximum before the first exp2. The branch is a warp's own, so all of it is one
piece of assembly. Where no m is raised the results are `softmax_step`'s, to the bit.
"""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon

MOST = "0f43800000"  # 2**8
SLACK = "0f41000000"  # 8
NEVER = "0fFF800000"  # -inf
ONE = "0f3F800000"


@gluon.constexpr_function
def pieces_of(n, pieces):
    """n pairs of scores in `Config.QUICK` pieces, each of whole fours: two of both rows."""
    ends = [i * (n // 4) // pieces * 4 for i in range(pieces + 1)]
    return [range(ends[i], ends[i + 1]) for i in range(pieces)]


@gluon.constexpr_function
def _weighing(n, pieces, ahead):
    """Of a thread with n pairs of adjacent scores, in turn of its two rows. Weights of even columns from $0 on, of odd ones from
    $n on; from $(2n) on the rows' sums, their m and their factors. Scores from $(3n) and $(4n) on, m from $(5n) on, $(6n) the
    scale. Scores are needed until their piece's sum has been looked at, so more pieces need fewer registers. `ahead`: exp2 of so
    many pairs of a piece is begun before the sums of the one before it, for it takes a while."""
    scale = f"${6 * n}"
    sums, ms, factors = ([f"${2 * n + first + row}" for row in range(2)] for first in (0, 2, 4))

    def weigh(piece, less):
        """Relative to minus m, or to another number of the rows."""
        lines = [] if less != ms else [f"neg.f32 less{row}, {ms[row]};" for row in range(2)]
        for i in piece:
            for where in (i, n + i):
                lines += [f"fma.rn.f32 ${where}, ${3 * n + where}, {scale}, less{i & 1};"]
                lines += [f"ex2.approx.ftz.f32 ${where}, ${where};"]
        return lines

    def add(piece):
        """Sums of two pairs to the rows' sums, as `lane_sum` has it; `more`: one of them is too large."""
        lines = []
        for first in piece[::4]:
            for row in range(2):
                pairs = [f"${i}, ${n + i}" for i in (first + row, first + row + 2)]
                lines += [f"add.f32 x{row}, {pairs[0]};", f"add.f32 y{row}, {pairs[1]};", f"add.f32 x{row}, x{row}, y{row};"]
                ored, last = ("", "") if first + row == piece[0] else (".or", ", more")
                lines += [f"setp.geu{ored}.f32 more, x{row}, {MOST}{last};"]
                lines += [f"mov.f32 t{row}, x{row};" if first == 0 else f"add.f32 t{row}, t{row}, x{row};"]
        return lines

    def raised(piece, row):
        """m by the maximum of a piece, as `softmax_step` has it, and the weights and sums of those before relative to that."""
        scores = [f"${3 * n + half * n + i}" for i in piece if i & 1 == row for half in range(2)]
        lines = [f"max.f32 x, {scores[0]}, {scores[1]};", *(f"max.f32 x, x, {one};" for one in scores[2:])]
        for lane in (1, 2):
            lines += [f"shfl.sync.bfly.b32 y, x, {lane}, 31, -1;", "max.f32 x, x, y;"]
        before = [f"${half * n + i}" for i in range(row, piece[0], 2) for half in range(2)]
        m, older = ms[row], (factors[row], *([sums[row]] if before else []), *before)  # sums: without the piece
        return [
            *lines, f"mul.rn.f32 x, x, {scale};", f"add.rn.f32 y, {m}, {SLACK};", "setp.gt.f32 more, x, y;",
            f"selp.f32 x, x, {m}, more;", f"setp.eq.f32 more, x, {NEVER};", "neg.f32 y, x;",
            f"selp.f32 less{row}, 0f00000000, y, more;", f"add.rn.f32 y, {m}, less{row};", "ex2.approx.ftz.f32 y, y;",
            *(f"mul.rn.f32 {one}, {one}, y;" for one in older), f"mov.f32 {m}, x;",
        ]  # fmt: skip

    lines = [
        ".reg .f32 x, y, x0, x1, y0, y1, t0, t1, less0, less1;",
        ".reg .pred more, any;",
        *(f"mov.f32 {ms[row]}, ${5 * n + row};" for row in range(2)),
        *(f"mov.f32 {factors[row]}, {ONE};" for row in range(2)),
        *(f"mov.f32 ${2 * n + i}, 0f00000000;" for i in range(6, n)),
    ]
    parts = [*pieces_of(n, pieces), range(0)]
    lines += weigh(parts[0], ms)
    for number in range(pieces):
        piece, following = parts[number : number + 2]
        begun = following[:ahead]
        start = [] if number == 0 else [f"mov.f32 t{row}, {sums[row]};" for row in range(2)]
        lines += [
            *weigh(begun, ms),
            *start,
            *add(piece),
            "vote.sync.any.pred any, more, -1;",
            f"@!any bra.uni LOW{number}_${{:uid}};",
            *raised(piece, 0),
            *raised(piece, 1),
            *weigh(piece, ("less0", "less1")),
            *start,
            *add(piece),
            *weigh(begun, ms),
            f"LOW{number}_${{:uid}}:",
            *(f"mov.f32 {sums[row]}, t{row};" for row in range(2)),
            *weigh(following[ahead:], ms),
        ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _operands(n):
    return ",".join(["=&f"] * 3 * n + ["f"] * 4 * n)


@gluon.jit
def _own(x, y):
    return x


@gluon.jit
def _by_row(x, like):
    """Of [64, 4], in whose rows all are equal, one each, in the layout of `like`. What is not taken is not shuffled."""
    return gl.convert_layout(gl.reduce(x, 1, _own), like.type.layout, assert_trivial=True)


@gluon.jit
def _first(x, COUNT: gl.constexpr):
    """Of [64, 4, COUNT] what stands first, [64, 4]."""
    HALF: gl.constexpr = COUNT // 2
    if COUNT == 1:
        return gl.reshape(x, [64, 4])
    else:
        x, _ = gl.split(gl.permute(gl.reshape(x, [64, 4, 2, HALF]), (0, 1, 3, 2)))
        return _first(x, HALF)


@gluon.jit
def quick_softmax_step(s_tile, m, scale, PIECES: gl.constexpr, AHEAD: gl.constexpr):
    """`softmax_step`'s weights, m and factor, and the sums of weights by lane."""
    N: gl.constexpr = s_tile.type.shape[1]
    ASM: gl.constexpr = _weighing(N // 4, PIECES, AHEAD)
    OPERANDS: gl.constexpr = _operands(N // 4)
    parts = gl.reshape(s_tile, [64, N // 8, 4, 2])
    even, odd = gl.split(parts)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, even.type.layout))
    rows = gl.convert_layout(m, ROWS, assert_trivial=True)[:, None, None]
    even, odd, told = gl.inline_asm_elementwise(
        ASM, OPERANDS, [even, odd, rows, scale], dtype=(gl.float32, gl.float32, gl.float32), is_pure=True, pack=N // 4
    )
    p_tile = gl.convert_layout(gl.reshape(gl.join(even, odd), [64, N]), s_tile.type.layout, assert_trivial=True)
    told, raised = gl.split(gl.reshape(gl.permute(told, (0, 2, 1)), [64, 4, N // 16, 2]))
    sums, factor = gl.split(gl.reshape(told, [64, 4, N // 32, 2]))
    SUMS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    added = gl.convert_layout(_first(sums, N // 32), SUMS, assert_trivial=True)
    return p_tile, _by_row(_first(raised, N // 16), m), _by_row(_first(factor, N // 32), m), added
