"""The producer: one warp that keeps the tensor memory accelerator busy, ahead of the warpgroups that compute."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon
from tilewise.backends.hopper.ring import fill
from tilewise.backends.hopper.work_tile import divide, locate, tile_at


@gluon.jit
def produce(q_desc, k_desc, v_desc, rings, a, C: gl.constexpr):
    """Queries once per work tile, then its keys and values from the right to the left. Rows beyond a tensor arrive as zeros."""
    WARPGROUPS: gl.constexpr = C.WARPGROUPS
    q_index = 0  # of the query tile
    kv_base = 0  # key tiles of the work tiles before
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        work, _ = locate(a, t, C)
        i += 1
        t = tile_at(a, i)
        kv_h = divide(work.h, a.group)
        if work.count > 0:
            for w in gl.static_range(WARPGROUPS):
                fill(rings.q, q_desc, q_index * WARPGROUPS + w, work.row, work.h, work.q_start + work.m0 + 64 * w)
            q_index += 1
        for j in range(work.count):
            at = work.k_start + (work.last - 1 - j) * C.BLOCK_N
            fill(rings.k, k_desc, kv_base + j, work.row, kv_h, at)
            fill(rings.v, v_desc, kv_base + j, work.row, kv_h, at)
        kv_base += work.count
