"""What the backward's roles share in shared memory, and zeros in it for keys and queries that must not matter."""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from tilewise.backends.hopper.backward.work_tile import seeing_queries, seen_keys
from tilewise.backends.hopper.compat import ZEROED_BARRIER, aggregate, fence_async_shared, gl, gluon, named_barrier
from tilewise.backends.hopper.ring import Ring, matrix, wait_full, zero_rows


@aggregate
class Rings:
    """What the producer fills."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring


@aggregate
class KeyRings:
    """What the roles share where keys are held."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring
    exchange: Ring  # what the warpgroups write for one another: dS, or weights where each has one gradient
    stats: gl.shared_memory_descriptor  # [stages of q, 2 M]


@gluon.jit
def zeroed():
    """Both warpgroups have zeroed their rows, and products may read them."""
    fence_async_shared()
    named_barrier("sync", ZEROED_BARRIER)


@gluon.jit
def has_unseen_keys(key0, lo, hi, work, a, C: gl.constexpr):
    """Does the key tile at key0 hold keys outside [lo, hi)? Beyond the tensor the loads have filled in zeros."""
    return (key0 < lo) | ((key0 + C.BLOCK_N > hi) & (work.k_start + hi < a.len_k))


@gluon.jit
def zero_unseen_keys(k_rows, v_rows, tile, k0, KEYS: gl.constexpr, a, C: gl.constexpr):
    """Keys that no query of the sequence sees become zeros in shared memory. Both warpgroups come here for every work tile."""
    if C.TERMS > 0 or C.VARLEN:
        lo, hi = seen_keys(tile.band, tile.work, C)
        if has_unseen_keys(tile.work.start, lo, hi, tile.work, a, C):
            zero_rows(k_rows, k0, lo, hi, KEYS)
            zero_rows(v_rows, k0, lo, hi, KEYS)
            zeroed()


@gluon.jit
def zero_halves(ring, other_ring, n, first, lo, hi, ROWS: gl.constexpr, WG: gl.constexpr):
    """Zero the rows outside [lo, hi) of the n-th tile of both rings; each warpgroup takes half of the rows."""
    HALF: gl.constexpr = ROWS // 2
    wait_full(ring, n)
    wait_full(other_ring, n)
    zero_rows(matrix(ring, n).slice(WG * HALF, HALF, dim=0), first + WG * HALF, lo, hi, HALF)
    zero_rows(matrix(other_ring, n).slice(WG * HALF, HALF, dim=0), first + WG * HALF, lo, hi, HALF)
    zeroed()


@gluon.jit
def zero_unseeing_queries(rings, n, m, tile, WG: gl.constexpr, C: gl.constexpr):
    """Queries that see no key, and those past a packed sequence's end, which belong to the next one, become zeros. Both
    warpgroups come here for every query tile, with no product in flight."""
    if C.VARLEN or C.EMPTY_ROWS:
        lo, hi = seeing_queries(tile.band, tile.work.len_q, C)
        if (m < lo) | (m + C.BLOCK_M > hi):
            zero_halves(rings.q, rings.do, n, m, lo, hi, C.BLOCK_M, WG)
