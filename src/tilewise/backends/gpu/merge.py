"""Merging partial results (out, lse) of the same rows over different keys, with unit (0, -inf): the one way all kernels do it.

    over parts seen so far:   acc = Σ exp(lse - m) out,   l = Σ exp(lse - m),   m = max lse

In natural units: the LSE of a row whose bias is the lowest finite number leaves fp32 when multiplied by log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.tile import LN2, LOG2E


@triton.jit
def add_part(acc, l, m, part_tile, lse):
    """Add one part: its out [M, DV] and lse [M]."""
    new_m = tl.maximum(m, lse)
    shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    rescale = tl.exp2((m - shift) * LOG2E)
    weight = tl.exp2((lse - shift) * LOG2E)
    return acc * rescale[:, None] + part_tile * weight[:, None], l * rescale + weight, new_m


@triton.jit
def add_parts(acc, l, m, outs, lses):
    """Add parts of one row, [1, DV]: their outs [N, DV] and lses [N]."""
    new_m = tl.maximum(m, tl.max(lses, 0))
    shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    rescale = tl.exp2((m - shift) * LOG2E)
    weights = tl.exp2((lses - shift) * LOG2E)  # one row: its shift is that of every part
    sums = tl.sum(outs * weights[:, None], 0)
    return acc * rescale[:, None] + sums[None, :], l * rescale + tl.sum(weights, 0), new_m


@triton.jit
def add_in_order(acc, l, m, part_tile, lse):
    """`add_part` where the bits count, in whichever kernel: it leaves the compiler no choice of what is fused."""
    new_m = tl.maximum(m, lse)
    shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    rescale = tl.exp2((m - shift) * LOG2E)
    weight = tl.exp2((lse - shift) * LOG2E)
    old = acc * rescale[:, None]
    return tl.fma(part_tile, tl.broadcast_to(weight[:, None], part_tile.shape), old), tl.fma(l, rescale, weight), new_m


@triton.jit
def part_of(acc, l, m):
    """`normalized` where the bits count."""
    whole = tl.where(l == 0.0, 1.0, l)
    part_tile = tl.where((l == 0.0)[:, None], 0.0, acc / whole[:, None])
    return part_tile, tl.where(l == 0.0, float("-inf"), tl.fma(tl.log2(whole), LN2, m))


@triton.jit
def add_sink(acc, l, m, sink):
    """Add the sink, a number or one for each row: one more key, of value 0. An infinite one has all the weight."""
    top = tl.maximum(m, sink)
    # where two infinities meet, their difference is no number
    rescale = tl.where(m == top, 1.0, tl.exp2((m - top) * LOG2E))
    weight = tl.where(sink == top, 1.0, tl.exp2((sink - top) * LOG2E))
    weight = tl.where(sink == float("-inf"), 0.0, weight)
    return acc * rescale[:, None], l * rescale + weight, top


@triton.jit
def normalized(acc, l, m):
    """(out, lse) of all parts; (0, -inf) where there was nothing."""
    whole = tl.where(l == 0.0, 1.0, l)
    return acc / whole[:, None], tl.where(l == 0.0, float("-inf"), m + tl.log2(whole) * LN2)
