"""The online softmax of a tile: scores from products q·k, mask, weights. Scores times `exp2_scale` are logarithms to base 2."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
def scores(s_tile, a, C: gl.constexpr):
    """Scores that `exp2_scale` turns into logarithms to base 2."""
    if C.SCORES == "softcap":
        return tanh(s_tile * a.softcap_slope) * a.scale_log2
    elif C.SCORES == "scale":
        return s_tile * a.scale_log2
    else:
        return s_tile


@gluon.jit
def exp2_scale(a, C: gl.constexpr):
    if C.SCORES == "fold":
        return a.scale_log2
    else:
        return 1.0


@gluon.jit
def masked(s_tile, band, row0, key0, C: gl.constexpr):
    """-inf where a row does not see a key."""
    LAYOUT: gl.constexpr = s_tile.type.layout
    k = key0 + gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, LAYOUT))
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
def lane_sum(x_tile):
    """Row sums as [64, 4] partials: a thread adds up only what it holds, so no step shuffles."""
    N: gl.constexpr = x_tile.type.shape[1]
    parts = gl.reshape(x_tile, [64, N // 8, 4, 2])  # in the accumulator's order: column 8 i + 2 lane + pair
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def softmax_step(s_tile, m, scale, MASKED: gl.constexpr):
    """Weights of a tile relative to 2**m, the raised m, and the factor that rescales older weights.

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
    return p_tile, new_m, rescale
