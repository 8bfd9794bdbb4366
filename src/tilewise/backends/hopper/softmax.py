"""The online softmax of a tile: scores from products q·k, mask, weights. Scores times `exp2_scale` are logarithms to base 2."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon
from tilewise.backends.hopper.quads import key_of_column
from tilewise.backends.hopper.work_tile import key_hi, key_lo

LOG2E = gl.constexpr(1.4426950408889634)
INF = gl.constexpr(float("inf"))
MAX_SLACK = gl.constexpr(8.0)
"""Weights are at most 2**8: far from overflow in 16 bits, and as precise, for rounding is relative."""


@gluon.jit
def tanh(x):
    """Accurate to rounding near 0 too, where (1 - e) / (1 + e) would cancel."""
    z = x * x
    small = x * (1.0 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835)))))
    e = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    return gl.where(z < 0.06, small, gl.where(x < 0, -large, large))


@gluon.jit
def logistic(x):
    """1 / (1 + 2**x). With x = -2 log2(e) y it is (1 + tanh y) / 2, to an absolute error of rounding: near 0 tanh is less precise
    than its own size, which a softcap that is not huge allows."""
    e = gl.exp2(x)
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def scores(s_tile, a, C: gl.constexpr):
    """Scores that `exp2_scale` turns into logarithms to base 2."""
    if C.SCORES == "softcap":
        return tanh(s_tile * a.softcap_slope) * a.scale_log2
    elif C.SCORES == "cap":
        return logistic(s_tile * a.softcap_slope)
    elif C.SCORES == "scale":
        return s_tile * a.scale_log2
    else:
        return s_tile


@gluon.jit
def exp2_scale(a, C: gl.constexpr):
    if C.SCORES == "fold" or C.SCORES == "cap":
        return a.scale_log2
    else:
        return 1.0


@gluon.jit
def masked(s_tile, band, row0, key0, C: gl.constexpr):
    """-inf where a row does not see a key."""
    LAYOUT: gl.constexpr = s_tile.type.layout
    k = gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    k = key0 + (key_of_column(k, C.BLOCK_N) if C.QUADS else k)
    if C.LEFT:
        q = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        lo = key_lo(band, q, C)
        width = gl.maximum(key_hi(band, q, C) - lo, 0)
        # lo <= k < hi as one comparison: below lo the difference wraps around to a huge number
        ok = (k[None, :] - lo[:, None]).to(gl.uint32) < width.to(gl.uint32)[:, None]
        return gl.where(ok, s_tile, -INF)
    elif C.BAND:
        q = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        return gl.where(k[None, :] < key_hi(band, q, C)[:, None], s_tile, -INF)
    else:
        return gl.where((k < band.end)[None, :], s_tile, -INF)


@gluon.jit
def lane_sum(x_tile, FOURS: gl.constexpr = False):
    """Row sums as [64, 4] partials: a thread adds up only what it holds, so no step shuffles. `FOURS`: sums of four first, as
    `quick_softmax_step` has them."""
    N: gl.constexpr = x_tile.type.shape[1]
    parts = gl.reshape(x_tile, [64, N // 8, 4, 2])  # in the accumulator's order: column 8 i + 2 lane + pair
    if FOURS:
        LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
        fours = gl.sum(gl.sum(gl.reshape(x_tile, [64, N // 16, 2, 4, 2]), 4), 2)
        return gl.convert_layout(gl.sum(fours, 1), LAYOUT, assert_trivial=True)
    else:
        return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def softmax_step(s_tile, m, scale, MASKED: gl.constexpr):
    """Weights of a tile relative to 2**m, the raised m, the factor that rescales older weights, and the largest scores.

    m only has to be near the running maximum, so that nothing overflows: it is raised when the maximum is more than MAX_SLACK
    above it, and most tiles leave it alone. Then the factor is exactly 1, for it is exp2 of the difference of rounded numbers.
    """
    top = gl.max(s_tile, 1) * scale
    new_m = gl.where(top > m + MAX_SLACK, top, m)
    shift = new_m
    if MASKED:
        shift = gl.where(new_m == -INF, 0.0, new_m)  # a row that has seen nothing yet
    rescale = gl.exp2(m - shift)
    p_tile = gl.exp2(s_tile * scale - shift[:, None])  # [64, N]
    return p_tile, new_m, rescale, top


@gluon.constexpr_function
def _rescale(n):
    """n numbers of a thread ($0.. from $n..) in alternate pairs of its two rows, times $2n and $(2n + 2)."""
    first, second = 2 * n, 2 * n + 2
    lines = [
        ".reg .pred moved, any;",
        f"setp.neu.f32 moved, ${first}, 0f3F800000;",
        f"setp.neu.or.f32 moved, ${second}, 0f3F800000, moved;",
        "vote.sync.any.pred any, moved, -1;",
        *(f"mov.f32 ${i}, ${n + i};" for i in range(n)),
        "@!any bra.uni STILL_${:uid};",
        *(f"mul.f32 ${i}, ${i}, ${second if i & 2 else first};" for i in range(n)),
    ]
    return "{ " + " ".join(lines) + " STILL_${:uid}: }"


@gluon.constexpr_function
def _rescale_operands(n):
    return ",".join(["=f"] * n + ["f"] * 2 * n)


@gluon.jit
def rescale_output(o_tile, factor, WIDTH: gl.constexpr):
    """An accumulator [64, WIDTH] of a warpgroup times a factor [64, 1] per row; a warp whose factors are all 1 skips it.

    Factors other than 1 are rare once a row has seen a key, so each warp checks its 16 rows first. The branch is inside one piece
    of assembly: Gluon's own branches are taken by a whole role, whose warps would first have to agree.
    """
    N: gl.constexpr = WIDTH // 2  # numbers of a thread
    ASM: gl.constexpr = _rescale(N)
    OPERANDS: gl.constexpr = _rescale_operands(N)
    return gl.inline_asm_elementwise(ASM, OPERANDS, [o_tile, factor], dtype=gl.float32, is_pure=True, pack=N)
