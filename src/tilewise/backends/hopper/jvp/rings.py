"""Rings of tiles and of their tangents, which come and go together: one barrier for both."""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from tilewise.backends.hopper.compat import aggregate, gl, gluon, mbarrier, tma_load
from tilewise.backends.hopper.ring import Ring, make_tiles, phase, stage


@aggregate
class JvpRings:
    """What the producer fills. A tangent is the tiles beside those of its ring, in a tuple that is empty where there is none."""

    q: Ring  # tiles of 64 rows, one for each warpgroup
    q_t: gl.tuple
    k: Ring
    k_t: gl.tuple
    v: Ring
    v_t: gl.tuple


@gluon.jit
def make_twin(desc, STAGES: gl.constexpr, MOVES: gl.constexpr):
    """Tiles for a tangent."""
    if MOVES:
        return (make_tiles(desc, STAGES),)
    else:
        return ()


@gluon.jit
def tangent_in(tiles, at):
    """The tangent's tile in stage `at` as a matrix [rows, width]."""
    ROWS: gl.constexpr = tiles[0].type.shape[3]
    WIDTH: gl.constexpr = tiles[0].type.shape[4]
    return tiles[0].index(at).reshape([ROWS, WIDTH])


@gluon.jit
def fill_pair(ring, twin, desc, t_desc, n, b, h, row):
    """Load the n-th tile and its tangent, if there is one, once their stage is free."""
    at = stage(ring, n)
    PARTS: gl.constexpr = 1 + len(twin)
    mbarrier.wait(ring.empty.index(at), phase(ring, n) ^ 1)
    mbarrier.expect(ring.full.index(at), desc.block_type.nbytes * PARTS)
    tma_load(desc, [b, h, row, 0], ring.full.index(at), ring.tiles.index(at))
    if PARTS > 1:
        tma_load(t_desc, [b, h, row, 0], ring.full.index(at), twin[0].index(at))
