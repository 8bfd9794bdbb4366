"""The producer of the JVP: one warp that keeps the tensor memory accelerator busy."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon
from tilewise.backends.hopper.jvp.rings import fill_pair
from tilewise.backends.hopper.work_tile import divide, locate, tile_at


@gluon.jit
def produce(q_desc, k_desc, v_desc, q_t_desc, k_t_desc, v_t_desc, rings, a, C: gl.constexpr):
    """Queries once per work tile, then its keys and values from the right to the left, each with its tangent. Rows beyond a
    tensor arrive as zeros."""
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
                row = work.q_start + work.m0 + 64 * w
                fill_pair(rings.q, rings.q_t, q_desc, q_t_desc, q_index * WARPGROUPS + w, work.row, work.h, row)
            q_index += 1
        for j in range(work.count):
            at = work.k_start + (work.last - 1 - j) * C.BLOCK_N
            fill_pair(rings.k, rings.k_t, k_desc, k_t_desc, kv_base + j, work.row, kv_h, at)
            fill_pair(rings.v, rings.v_t, v_desc, v_t_desc, kv_base + j, work.row, kv_h, at)
        kv_base += work.count
