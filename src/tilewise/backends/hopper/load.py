"""The loading role: one warp that keeps the tensor memory accelerator busy, ahead of the warpgroups that compute."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.ring import fill
from tilewise.backends.hopper.schedule import divide, locate, tile_at


@gluon.jit
def load(q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, a, C: gl.constexpr):
    """Queries once for a tile, then its keys and values from the right to the left. Rows beyond a tensor arrive as zeros."""
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    served = 0
    taken = 0
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        spot, _ = locate(a, t, C)
        i += 1
        t = tile_at(a, i)
        kv_h = divide(spot.h, a.group)
        if spot.count > 0:
            for w in gl.static_range(WARPGROUPS):
                fill(q_ring, q_desc, served * WARPGROUPS + w, spot.row, spot.h, spot.q_start + spot.m0 + 64 * w)
            served += 1
        for j in range(spot.count):
            at = spot.k_start + (spot.last - 1 - j) * C.BLOCK_N
            fill(k_ring, k_desc, taken + j, spot.row, kv_h, at)
            fill(v_ring, v_desc, taken + j, spot.row, kv_h, at)
        taken += spot.count
