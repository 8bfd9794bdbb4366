"""A ring of tiles in shared memory between the warp that loads and the warpgroups that compute."""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.hopper.shim import aggregate, tma_load


@aggregate
class Ring:
    """full[i]: tile i has landed; empty[i]: all its readers are done. The n-th tile ever takes place n % STAGES."""

    tiles: gl.shared_memory_descriptor  # [STAGES, 1, 1, rows, width]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty


@gluon.jit
def make_barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that turn after COUNT arrivals each. Make none that nobody waits for: the compiler would give its memory to a
    tile, and when the GPU turns to another process and back it rewrites every barrier it has seen initialised."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def make_tiles(desc, STAGES: gl.constexpr):
    ROWS: gl.constexpr = desc.block_type.shape[2]
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    return gl.allocate_shared_memory(desc.dtype, [STAGES, 1, 1, ROWS, WIDTH], desc.layout)


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring for tiles of the descriptor."""
    return Ring(make_tiles(desc, STAGES), make_barriers(STAGES, 1), make_barriers(STAGES, READERS))


@gluon.jit
def make_follower(desc, leader, STAGES: gl.constexpr):
    """A ring that turns together with another one: its tiles are free when that one's are."""
    return Ring(make_tiles(desc, STAGES), make_barriers(STAGES, 1), leader.empty)


@gluon.jit
def phase(ring, n):
    """The parity with which the n-th tile's barriers turn."""
    return (n // ring.tiles.type.shape[0]) & 1


@gluon.jit
def place(ring, n):
    return n % ring.tiles.type.shape[0]


@gluon.jit
def fill(ring, desc, n, b, h, row):
    """Load the n-th tile once its place is free."""
    at = place(ring, n)
    mbarrier.wait(ring.empty.index(at), phase(ring, n) ^ 1)
    mbarrier.expect(ring.full.index(at), desc.block_type.nbytes)
    tma_load(desc, [b, h, row, 0], ring.full.index(at), ring.tiles.index(at))


@gluon.jit
def await_tile(ring, n, pred=True):
    mbarrier.wait(ring.full.index(place(ring, n)), phase(ring, n), pred=pred)


@gluon.jit
def release(ring, n, pred=True):
    mbarrier.arrive(ring.empty.index(place(ring, n)), count=1, pred=pred)


@gluon.jit
def matrix(ring, n):
    """The n-th tile as a matrix [rows, width]."""
    ROWS: gl.constexpr = ring.tiles.type.shape[3]
    WIDTH: gl.constexpr = ring.tiles.type.shape[4]
    return ring.tiles.index(place(ring, n)).reshape([ROWS, WIDTH])
