"""Merging partial results (out, lse) of the same rows over different keys, with unit (0, -inf): the one way all kernels do it.

over parts seen so far:   acc = Σ exp2(lse2 - m) out,   l = Σ exp2(lse2 - m),   m = max lse2        (lse2 in units of log 2)
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.tile import LN2, LOG2E


@triton.jit
def joined(acc, l, m, part_tile, lse):
    """One part more: its out [M, DV] and lse [M]."""
    lse2 = lse * LOG2E
    new_m = tl.maximum(m, lse2)
    shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    fade = tl.exp2(m - shift)
    weight = tl.exp2(lse2 - shift)
    return acc * fade[:, None] + part_tile * weight[:, None], l * fade + weight, new_m


@triton.jit
def merged(acc, l, m):
    """(out, lse) of all parts."""
    whole = tl.where(l == 0.0, 1.0, l)
    return acc / whole[:, None], tl.where(l == 0.0, float("-inf"), (m + tl.log2(whole)) * LN2)
