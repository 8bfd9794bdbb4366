"""The producers: one warp that keeps the tensor memory accelerator busy, ahead of the warpgroups that compute."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, mbarrier, tma_load
from tilewise.backends.hopper.grad_tile import (
    beyond_queries,
    head_statistics,
    listed_statistics,
    locate_keys,
    locate_queries,
    sweep_of,
    sweep_sides,
)
from tilewise.backends.hopper.listed import QUERIES
from tilewise.backends.hopper.lists import announce, first_tile, next_listed, row_of, tile_number
from tilewise.backends.hopper.producer import fill_listed
from tilewise.backends.hopper.ring import fill, fill_free, phase, stage
from tilewise.backends.hopper.work_tile import beyond_keys, divide, tile_at


@gluon.jit
def fill_queries(ring, desc, stats, stats_desc, n, row, h, token, stat_tile, listed):
    """The n-th query tile and its statistics, on one barrier. `listed`: of a list also its place, if it is PARTIAL, and words."""
    BYTES: gl.constexpr = desc.block_type.nbytes + stats_desc.block_type.nbytes
    at = stage(ring, n)
    mbarrier.wait(ring.empty.index(at), phase(ring, n) ^ 1)
    if len(listed) > 0:
        announce(listed[2], at, listed[0], listed[1])
    mbarrier.expect(ring.full.index(at), BYTES)
    tma_load(desc, [row, h, token, 0], ring.full.index(at), ring.tiles.index(at))
    tma_load(stats_desc, [stat_tile * stats.type.shape[1]], ring.full.index(at), stats.index(at))


@gluon.jit
def produce_for_keys(q_desc, do_desc, k_desc, v_desc, stats_desc, rings, stats, a, C: gl.constexpr):
    """Keys and values once per work tile, then the queries of all heads of its group. Rows beyond a tensor arrive as zeros."""
    q_base = 0  # query tiles of the work tiles before
    kv_index = 0  # of the key tile
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        work, _ = locate_keys(a, t, C)
        sweep = sweep_of(work, i, C)
        i += 1
        t = tile_at(a, i)
        n = q_base
        stat_tile = head_statistics(work, a) + sweep.tile
        if not C.SPLIT:
            if work.count > 0:
                fill(rings.k, k_desc, kv_index, work.row, work.h, work.k_start + work.start)
        if C.LISTS is not None:
            row = row_of(a.lists, work.b, work.h * a.group.value, work.start // C.BLOCK_N)
            cursor = first_tile(a.lists, row, beyond_queries(a, C))
            stat_tile = head_statistics(work, a)
        h = work.h * a.group.value
        token = work.q_start + sweep.tile * C.BLOCK_M
        outer, inner = sweep_sides(work, a, C)
        for turn in range(outer):
            stat0 = stat_tile
            if not C.GROUPED:
                h = work.h * a.group.value + turn
                token = work.q_start + work.first * C.BLOCK_M
            for j in range(inner):
                listed = ()
                if C.LISTS is not None:
                    token = tile_number(cursor) * C.BLOCK_M
                    stat_tile = listed_statistics(tile_number(cursor), stat0, a, C)
                    listed = (cursor, j < work.first, rings.listed[0])
                    cursor = next_listed(cursor, a.lists, row, j, work.first, work.count)
                fill_queries(rings.q, q_desc, stats, stats_desc, n, work.row, h, token, stat_tile, listed)
                if C.SPLIT:
                    fill(rings.do, do_desc, n, work.row, h, token)
                else:
                    fill_free(rings.do, do_desc, n, work.row, h, token)
                # a single stage may still be in use by the last work tile when the first queries of this one have theirs
                if n == q_base:
                    fill(rings.v, v_desc, kv_index, work.row, work.h, work.k_start + work.start)
                    if C.SPLIT:
                        fill(rings.k, k_desc, kv_index, work.row, work.h, work.k_start + work.start)
                    kv_index += 1
                n += 1
                if C.GROUPED:
                    h += 1
                    stat_tile += a.stat_blocks
                elif C.LISTS is None:
                    token += C.BLOCK_M
                    stat_tile += 1
            if C.GROUPED:
                h -= inner
                token += sweep.step * C.BLOCK_M
                stat_tile = stat0 + sweep.step
            elif C.LISTS is not None:
                stat_tile = stat0 + a.stat_blocks
            else:
                stat_tile += a.stat_blocks - work.count
        q_base = n


@gluon.jit
def produce_for_queries(q_desc, do_desc, k_desc, v_desc, rings, a, C: gl.constexpr):
    """Queries once per work tile, 64 for each warpgroup, then its keys and values from the left to the right."""
    kv_base = 0  # key tiles of the work tiles before
    q_index = 0  # of the query tile
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        work, _ = locate_queries(a, t, C)
        i += 1
        t = tile_at(a, i)
        kv_h = divide(work.h, a.group)
        if work.count > 0:
            for w in gl.static_range(2):
                fill(rings.q, q_desc, q_index * 2 + w, work.row, work.h, work.q_start + work.start + 64 * w)
                fill(rings.do, do_desc, q_index * 2 + w, work.row, work.h, work.q_start + work.start + 64 * w)
            q_index += 1
        if C.LISTS is not None:
            row = row_of(a.lists, work.b, work.h, work.start // QUERIES)
            cursor = first_tile(a.lists, row, beyond_keys(a, C))
        for j in range(work.count):
            if C.LISTS is not None:
                here = cursor
                at = tile_number(here) * C.BLOCK_N
                cursor = next_listed(here, a.lists, row, j, work.first, work.count)
                fill_listed(rings, k_desc, kv_base + j, work.row, kv_h, at, here, j < work.first)
            else:
                at = work.k_start + (work.first + j) * C.BLOCK_N
                fill(rings.k, k_desc, kv_base + j, work.row, kv_h, at)
            fill(rings.v, v_desc, kv_base + j, work.row, kv_h, at)
        kv_base += work.count
