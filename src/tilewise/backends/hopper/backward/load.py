"""The loading role: one warp that keeps the tensor memory accelerator busy, ahead of the warpgroups that compute."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.hopper.backward.schedule import first_statistics, locate_keys
from tilewise.backends.hopper.ring import fill, phase, place
from tilewise.backends.hopper.schedule import tile_at
from tilewise.backends.hopper.shim import tma_load


@gluon.jit
def fill_queries(ring, desc, stats, stats_desc, n, row, h, token, stat_tile):
    """The n-th tile of queries and its statistics, on one barrier."""
    BYTES: gl.constexpr = desc.block_type.nbytes + stats_desc.block_type.nbytes
    at = place(ring, n)
    mbarrier.wait(ring.empty.index(at), phase(ring, n) ^ 1)
    mbarrier.expect(ring.full.index(at), BYTES)
    tma_load(desc, [row, h, token, 0], ring.full.index(at), ring.tiles.index(at))
    tma_load(stats_desc, [stat_tile * stats.type.shape[1]], ring.full.index(at), stats.index(at))


@gluon.jit
def fill_freed(ring, desc, n, row, h, token):
    """Load the n-th tile, whose place is known to be free."""
    at = place(ring, n)
    mbarrier.expect(ring.full.index(at), desc.block_type.nbytes)
    tma_load(desc, [row, h, token, 0], ring.full.index(at), ring.tiles.index(at))


@gluon.jit
def load_for_keys(
    q_desc, do_desc, k_desc, v_desc, stats_desc, stats, q_ring, do_ring, k_ring, v_ring, a, C: gl.constexpr
):
    """Keys and values once for a tile, then the queries of all heads of its group. Rows beyond a tensor arrive as zeros."""
    taken = 0
    served = 0
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        spot, _ = locate_keys(a, t, C)
        i += 1
        t = tile_at(a, i)
        n = taken
        stat_tile = first_statistics(spot, a)
        if not C.SPLIT:
            if spot.count > 0:
                fill(k_ring, k_desc, served, spot.row, spot.h, spot.k_start + spot.n0)
        for g in range(a.group.value):
            h = spot.h * a.group.value + g
            token = spot.q_start + spot.first * C.BLOCK_M
            for j in range(spot.count):
                fill_queries(q_ring, q_desc, stats, stats_desc, n, spot.row, h, token, stat_tile)
                if C.SPLIT:
                    fill(do_ring, do_desc, n, spot.row, h, token)
                else:
                    fill_freed(do_ring, do_desc, n, spot.row, h, token)
                # what has one place may still be in use by the last tile when the first queries of this one have theirs
                if n == taken:
                    fill(v_ring, v_desc, served, spot.row, spot.h, spot.k_start + spot.n0)
                    if C.SPLIT:
                        fill(k_ring, k_desc, served, spot.row, spot.h, spot.k_start + spot.n0)
                    served += 1
                n += 1
                token += C.BLOCK_M
                stat_tile += 1
            stat_tile += a.stat_blocks - spot.count
        taken = n
