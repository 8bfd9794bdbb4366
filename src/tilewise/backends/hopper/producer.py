"""The producer: one warp that keeps the tensor memory accelerator busy, ahead of the warpgroups that compute."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, mbarrier
from tilewise.backends.hopper.lists import announce, first_tile, next_listed, row_of, tile_number
from tilewise.backends.hopper.quads import fill_quads
from tilewise.backends.hopper.ring import bias_ring, fill, fill_bias, fill_free, phase, stage
from tilewise.backends.hopper.work_tile import beyond_keys, divide, locate, tile_at


@gluon.jit
def fill_keys(ring, desc, n, b, h, row, C: gl.constexpr):
    if C.QUADS:
        fill_quads(ring, desc, n, b, h, row)
    else:
        fill(ring, desc, n, b, h, row)


@gluon.jit
def fill_listed(rings, k_desc, n, b, h, row, cursor, partial):
    """Load the n-th key tile, one of a list, and say which it is."""
    at = stage(rings.k, n)
    mbarrier.wait(rings.k.empty.index(at), phase(rings.k, n) ^ 1)
    announce(rings.listed[0], at, cursor, partial)
    fill_free(rings.k, k_desc, n, b, h, row)


@gluon.jit
def produce(q_desc, k_desc, v_desc, b_desc, rings, a, C: gl.constexpr):
    """Queries once per work tile, then its keys and values: from the right to the left, or in the order of a list. Rows beyond a
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
                fill(rings.q, q_desc, q_index * WARPGROUPS + w, work.row, work.h, work.q_start + work.m0 + 64 * w)
            q_index += 1
        if C.LISTS is not None:
            row = row_of(a.lists, work.b, work.h, work.m0 // (64 * C.WARPGROUPS))
            cursor = first_tile(a.lists, row, beyond_keys(a, C))
            for j in range(work.count):
                here = cursor
                at = tile_number(here) * C.BLOCK_N
                # read before this tile's stage is waited for
                cursor = next_listed(here, a.lists, row, j, work.last, work.count)
                fill_listed(rings, k_desc, kv_base + j, work.row, kv_h, at, here, j < work.last)
                fill(rings.v, v_desc, kv_base + j, work.row, kv_h, at)
        else:
            for j in range(work.count):
                at = work.k_start + (work.last - 1 - j) * C.BLOCK_N
                fill_keys(rings.k, k_desc, kv_base + j, work.row, kv_h, at, C)
                if C.BIAS_STAGES > 0:
                    for w in gl.static_range(WARPGROUPS):
                        n = (kv_base + j) * WARPGROUPS + w
                        b, h = work.b * a.bias_b, work.h * a.bias_h
                        fill_bias(bias_ring(rings), b_desc[0], n, b, h, work.m0 + 64 * w, at)
                fill_keys(rings.v, v_desc, kv_base + j, work.row, kv_h, at, C)
        kv_base += work.count
