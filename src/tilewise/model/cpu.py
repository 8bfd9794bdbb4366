"""The CPU's tiles, derived from its registers and caches.

The CPU kernel keeps scores transposed: vector lanes are query rows, so maximum, sum and rescaling need no shuffles.
Three sizes follow, from the inside out:

register tile   `rows` = lanes × row_vectors query rows against `key_unroll` keys, one accumulator register per
                row vector and key; per step of the head dimension it loads `row_vectors` vectors of Q and the
                keys' scalars.
block_k         keys whose K and V stay near (in L1, or packed in L2) while every strip of rows passes over them.
block_q         rows over which bringing in (and packing) a K/V tile is paid back.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from tilewise.hardware.spec import DeviceSpec
from tilewise.model.grid import bucket, even
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

MERGE_COST = 0.01
"""The part of the multiplications that rescaling and merging a strip's accumulator may cost: it fixes block_k."""


ROWS = 256
"""Rows that share a block of keys, where no kernel says better."""
SMALL_WORK = 3.0e6
"""Multiply-adds below which waking a second thread costs more than it brings."""


TALL_ROWS = ((2 << 20, 1200.0), (1 << 20, 800.0), (0, 400.0))
"""(bytes of L2, rows): rows of a task beyond which Q and O crowd L2 more than packing K and V less often brings."""


def tall_rows(spec: DeviceSpec, backward: bool) -> float:
    """TALL_ROWS of a processor; half in the backward, which holds dO and dQ as well."""
    rows = next(rows for size, rows in TALL_ROWS if spec.l2_bytes >= size)
    return rows / 2 if backward else rows


def threads_for(problem: Problem, spec: DeviceSpec) -> int:
    """Threads that share a call: one where it is small."""
    scores = 1.0 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    return 1 if scores * (problem.head_dim + problem.head_dim_v) < SMALL_WORK else spec.workers


class RegisterTile(NamedTuple):
    """A register tile and what it costs."""

    row_vectors: int
    keys: int
    registers: int
    loads: float

    @property
    def accumulators(self) -> int:
        return self.row_vectors * self.keys

    @property
    def loads_per_fma(self) -> float:
        return self.loads / self.accumulators


@lru_cache(maxsize=256)
def register_tile(spec: DeviceSpec, itemsize: int = 4, head_dim: int = 0) -> tuple[RegisterTile, str]:
    """The smallest register tile that keeps the FMA pipes busy; among equals the tallest.

    Busy means: two accumulators for every FMA in flight (latency × FMAs a cycle), so that a late load does not drain
    the pipes, and load ports at most half as busy as the FMA pipes. Small tiles skip masked keys at a finer grain and
    leave fewer idle lanes at the edges; tall ones pass over a K/V tile fewer times. Where the registers do not allow
    it, as with AVX2's sixteen, the most accumulators and then the fewest loads win.

    With a head dim, a strip of that width must leave half of L1 to what passes by it: every panel reads the whole strip.
    (On a Xeon with AVX-512, head dim 128, 64 rows × 4 keys reached 1.07 of SDPA's speed, 48 × 8 reached 1.12 to 1.22.)
    """
    wanted = 2 * spec.fma_latency * spec.fma_per_cycle
    candidates = list(_micro_tiles(spec, itemsize))
    busy = [
        tile
        for tile in candidates
        if tile.accumulators >= wanted
        and tile.loads / spec.loads_per_cycle <= 0.5 * tile.accumulators / spec.fma_per_cycle
    ]
    strip_bytes = spec.lanes(itemsize) * head_dim * itemsize  # of one row vector
    if busy:
        near = [tile for tile in busy if tile.row_vectors * strip_bytes <= spec.l1d_bytes // 2]
        lowest = min(tile.row_vectors for tile in busy)
        best = min(
            near or [tile for tile in busy if tile.row_vectors == lowest],
            key=lambda tile: (tile.accumulators, -tile.row_vectors),
        )
        why = f"the smallest with {wanted:g} accumulators (2 × latency × FMAs a cycle) and idle load ports"
        if head_dim and best.accumulators > min(tile.accumulators for tile in busy):
            why += ", low enough that a strip leaves room in L1"
    else:
        best = min(candidates, key=lambda tile: (-tile.accumulators, tile.loads_per_fma))
        why = f"{wanted:g} accumulators would not fit; the most that do, with the fewest loads"
    rows = best.row_vectors * spec.lanes(itemsize)
    return best, (
        f"register tile {rows} rows × {best.keys} keys: {best.accumulators} accumulators, "
        f"{best.registers} of {spec.vector_registers} registers, {best.loads_per_fma:.2f} loads per FMA ({why})"
    )


def short_tile(spec: DeviceSpec, itemsize: int, tile: RegisterTile, rows: int) -> RegisterTile:
    """The register tile for so few query rows that half of `tile` or more would be idle: no taller than they are.

    Of those the smallest with an accumulator for every FMA in flight (latency × FMAs a cycle): a product keeps two sets of sums.
    """
    vectors = -(-rows // spec.lanes(itemsize))
    if 2 * vectors > tile.row_vectors:
        return tile
    low = [t for t in _micro_tiles(spec, itemsize) if t.row_vectors == vectors]
    enough = [t for t in low if t.accumulators >= spec.fma_latency * spec.fma_per_cycle]
    return min(enough, key=lambda t: t.accumulators, default=tile)


def _micro_tiles(spec: DeviceSpec, itemsize: int) -> Iterator[RegisterTile]:
    lanes = spec.lanes(itemsize)
    by_lane = spec.isa == "neon"  # FMLA takes its scalar from a lane: one load brings `lanes` keys' scalars
    for row_vectors in (1, 2, 3, 4, 6, 8):  # strips must tile block_q, a power of two or three times one
        for keys in (4, 8, 16):  # and their keys block_k, a power of two
            key_registers = -(-keys // lanes) if by_lane else 1
            registers = row_vectors * keys + row_vectors + key_registers
            if registers <= spec.vector_registers:
                loads = row_vectors + (keys / lanes if by_lane else keys)
                yield RegisterTile(row_vectors, keys, registers, loads)


def key_block(problem: Problem, spec: DeviceSpec) -> int:
    """Keys of a block: `whole_key_block`, but no more than there are, in whole register tiles."""
    sizes = even(problem)
    size = 8 if problem.arithmetic == "float64" else 4
    micro, _ = register_tile(spec, size, max(sizes.head_dim, sizes.head_dim_v))
    return min(whole_key_block(problem, spec), -(-max(1, bucket(sizes.seqlen_k)) // micro.keys) * micro.keys)


def whole_key_block(problem: Problem, spec: DeviceSpec) -> int:
    """The fewest keys whose merges are cheap enough, a power of two, in a quarter of L2 at most, however many keys there are."""
    size = 8 if problem.arithmetic == "float64" else 4  # narrower inputs are widened
    keys = next(n for n in (64, 128, 256) if 1 / n <= MERGE_COST)
    while keys > 32 and keys * (problem.head_dim + problem.head_dim_v) * size > spec.l2_bytes // 4:
        keys //= 2
    return keys


def cpu_tile(spec: DeviceSpec, problem: Problem) -> TilePlan:
    """The model's own tile, for a forward whose kernel has none of ours: blocks of keys that pay for their merges, and as many
    rows as share them well (ROWS), if there are as many."""
    sizes = even(problem)
    size = 8 if problem.arithmetic == "float64" else 4
    micro, why = register_tile(spec, size, max(sizes.head_dim, sizes.head_dim_v))
    rows = spec.lanes(size) * micro.row_vectors
    block_q = -(-max(1, min(ROWS, sizes.seqlen_q)) // rows) * rows
    return TilePlan(
        block_q,
        key_block(problem, spec),
        stages=1,
        warps=1,
        register_tile=(rows, micro.keys),
        registers=micro.registers,
        resident=1,
        reasons=(why,),
    )
