"""A ring of tiles in shared memory: the pipeline between the warp that loads and the warpgroups that compute."""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from tilewise.backends.hopper.compat import aggregate, gl, gluon, mbarrier, tma_load


@aggregate
class Ring:
    """full[i]: the tile in stage i has landed; empty[i]: all its readers are done. The n-th tile ever is in stage n % STAGES.
    A tile of UNITS units lies there as so many matrices, each with the next columns."""

    tiles: gl.shared_memory_descriptor  # [STAGES * UNITS, 1, 1, rows, width]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class Rings:
    """What the producer of the forward fills."""

    q: Ring  # tiles of 64 rows, one for each warpgroup
    k: Ring
    v: Ring
    bias: gl.tuple  # the parts of a ring of tiles [64, N] where there is one, one for each warpgroup
    drawn: gl.tuple  # the parts of a ring of bits where there is one, see `draw.make_drawn`
    listed: gl.tuple  # of a list: the words that the producer leaves beside keys, see `lists.announce`


@aggregate
class GradRings:
    """What the producers of the backward fill."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring
    listed: gl.tuple  # words beside what is streamed, see above


@aggregate
class KeyRings:
    """What the roles share where the backward holds keys."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring
    exchange: Ring  # what the warpgroups write for one another: dS, or weights where each has one gradient
    stats: gl.shared_memory_descriptor  # [stages of q, 2 M]
    listed: gl.tuple  # words beside queries


@gluon.jit
def make_barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """Barriers whose phase ends after COUNT arrivals each. Make none that nobody waits for: the compiler would give its memory
    to a tile, and when the GPU turns to another process and back it rewrites every barrier it has seen initialised."""
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
def make_ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr, UNITS: gl.constexpr = 1):
    """A ring for tiles of the descriptor, or of so many of them side by side."""
    tiles = make_tiles(desc, STAGES * UNITS)
    return Ring(tiles=tiles, full=make_barriers(STAGES, 1), empty=make_barriers(STAGES, READERS))


@gluon.jit
def make_follower(desc, leader, STAGES: gl.constexpr):
    """A ring that advances together with another one: its tiles are free when that one's are."""
    return Ring(tiles=make_tiles(desc, STAGES), full=make_barriers(STAGES, 1), empty=leader.empty)


@gluon.jit
def phase(ring, n):
    """The parity of the n-th tile's barriers."""
    return (n // ring.full.type.shape[0]) & 1


@gluon.jit
def stage(ring, n):
    return n % ring.full.type.shape[0]


@gluon.constexpr_function
def units_in(tiles, stages):
    """Of a tile, from the shapes of a ring's tiles and of its barriers."""
    return tiles[0] // stages[0]


@gluon.jit
def fill(ring, desc, n, b, h, row):
    """Load the n-th tile once its stage is free."""
    mbarrier.wait(ring.empty.index(stage(ring, n)), phase(ring, n) ^ 1)
    fill_free(ring, desc, n, b, h, row)


@gluon.jit
def bias_ring(rings):
    return Ring(tiles=rings.bias[0], full=rings.bias[1], empty=rings.bias[2])


@gluon.jit
def fill_bias(ring, desc, n, b, h, row, key):
    """Load the n-th tile of a bias once its stage is free."""
    at = stage(ring, n)
    mbarrier.wait(ring.empty.index(at), phase(ring, n) ^ 1)
    mbarrier.expect(ring.full.index(at), desc.block_type.nbytes)
    tma_load(desc, [b, h, row, key], ring.full.index(at), ring.tiles.index(at))


@gluon.jit
def fill_free(ring, desc, n, b, h, row):
    """Load the n-th tile, whose stage is known to be free."""
    UNITS: gl.constexpr = units_in(ring.tiles.type.shape, ring.full.type.shape)
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    at = stage(ring, n)
    mbarrier.expect(ring.full.index(at), desc.block_type.nbytes * UNITS)
    for unit in gl.static_range(UNITS):
        tma_load(desc, [b, h, row, unit * WIDTH], ring.full.index(at), ring.tiles.index(at * UNITS + unit))


@gluon.jit
def wait_full(ring, n, pred=True):
    mbarrier.wait(ring.full.index(stage(ring, n)), phase(ring, n), pred=pred)


@gluon.jit
def release(ring, n, pred=True):
    mbarrier.arrive(ring.empty.index(stage(ring, n)), count=1, pred=pred)


@gluon.jit
def matrix_in(ring, at):
    """The tile in stage `at` as a matrix [rows, width]."""
    ROWS: gl.constexpr = ring.tiles.type.shape[3]
    WIDTH: gl.constexpr = ring.tiles.type.shape[4]
    return ring.tiles.index(at).reshape([ROWS, WIDTH])


@gluon.jit
def matrix(ring, n):
    """The n-th tile as a matrix [rows, width]."""
    return matrix_in(ring, stage(ring, n))


@gluon.jit
def units(ring, at):
    """The tile in stage `at` as matrices [rows, width], side by side."""
    UNITS: gl.constexpr = units_in(ring.tiles.type.shape, ring.full.type.shape)
    found = ()
    for unit in gl.static_range(UNITS):
        found += (matrix_in(ring, at * UNITS + unit),)
    return found
