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
from typing import Any, NamedTuple

from tilewise.hardware.spec import DeviceSpec, KiB
from tilewise.model.grid import bucket, even
from tilewise.problem import Problem

MAX_BLOCK = 256
MERGE_COST = 0.01
"""The part of the multiplications that rescaling and merging a strip's accumulator may cost: it fixes block_k."""
REFILL_COST = 0.02
"""The part that bringing a K/V tile into cache (and packing it) may cost: it fixes block_q."""


class CpuTile(NamedTuple):
    """What the CPU backend generates code for."""

    block_q: int
    block_k: int
    lanes: int
    row_vectors: int
    key_unroll: int
    packed: bool
    """Copy K and V tiles into contiguous buffers first: always for 16-bit inputs (they are widened on the way) and
    where the tile lives in L2, because power-of-two strides would collide in L1."""
    resident: str
    """`L1` or `L2`: where the K/V tile stays."""
    splits: int
    """Parts of the keys computed separately and merged, so that few queries still occupy all cores."""
    accumulators: int
    registers: int
    """Registers the inner loop holds, accumulators included."""
    tile_bytes: int
    """K and V of one tile, in fp32 or fp64 as they are multiplied."""
    reasons: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Height of a strip."""
        return self.lanes * self.row_vectors

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "rows": self.rows, "reasons": list(self.reasons)}


class _Micro(NamedTuple):
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


def cpu_tile(spec: DeviceSpec, problem: Problem) -> CpuTile:
    """The tile for `problem` on the CPU `spec`; cached, since every call asks for one."""
    sizes = even(problem)
    lengths = (bucket(sizes.seqlen_q), bucket(sizes.seqlen_k))
    return _cpu_tile(spec, sizes.batch * sizes.heads, lengths, (sizes.head_dim, sizes.head_dim_v), sizes.itemsize)


@lru_cache(maxsize=4096)
def _cpu_tile(
    spec: DeviceSpec, heads: int, lengths: tuple[int, int], dims: tuple[int, int], itemsize: int
) -> CpuTile:
    size = max(4, itemsize)  # 16-bit inputs are widened
    lanes = spec.lanes(size)
    micro, why_micro = register_tile(spec, size, max(dims))
    rows = lanes * micro.row_vectors
    d_pair = sum(dims)
    block_k, resident, why_k = _block_k(spec, rows, d_pair, size)
    packed = resident == "L2" or itemsize < 4
    block_q, why_q = _block_q(spec, rows, block_k, d_pair, size, packed)
    block_k = min(block_k, _round_up(max(1, lengths[1]), micro.keys))
    block_q, splits, why_par = _parallel(spec, heads, lengths, (block_q, block_k), rows)
    return CpuTile(
        block_q=block_q,
        block_k=block_k,
        lanes=lanes,
        row_vectors=micro.row_vectors,
        key_unroll=micro.keys,
        packed=packed,
        resident=resident,
        splits=splits,
        accumulators=micro.accumulators,
        registers=micro.registers,
        tile_bytes=block_k * d_pair * size,
        reasons=(why_micro, why_k, why_q, *why_par),
    )


def register_tile(spec: DeviceSpec, itemsize: int = 4, head_dim: int = 0) -> tuple[_Micro, str]:
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


def short_tile(spec: DeviceSpec, itemsize: int, tile: _Micro, rows: int) -> _Micro:
    """The register tile for so few query rows that half of `tile` or more would be idle: no taller than they are.

    Of those the smallest with an accumulator for every FMA in flight (latency × FMAs a cycle): a product keeps two sets of sums.
    """
    vectors = -(-rows // spec.lanes(itemsize))
    if 2 * vectors > tile.row_vectors:
        return tile
    low = [t for t in _micro_tiles(spec, itemsize) if t.row_vectors == vectors]
    enough = [t for t in low if t.accumulators >= spec.fma_latency * spec.fma_per_cycle]
    return min(enough, key=lambda t: t.accumulators, default=tile)


def _micro_tiles(spec: DeviceSpec, itemsize: int) -> Iterator[_Micro]:
    lanes = spec.lanes(itemsize)
    by_lane = spec.isa == "neon"  # FMLA takes its scalar from a lane: one load brings `lanes` keys' scalars
    for row_vectors in (1, 2, 3, 4, 6, 8):  # strips must tile block_q, a power of two or three times one
        for keys in (4, 8, 16):  # and their keys block_k, a power of two
            key_registers = -(-keys // lanes) if by_lane else 1
            registers = row_vectors * keys + row_vectors + key_registers
            if registers <= spec.vector_registers:
                loads = row_vectors + (keys / lanes if by_lane else keys)
                yield _Micro(row_vectors, keys, registers, loads)


def _block_k(spec: DeviceSpec, rows: int, d_pair: int, size: int) -> tuple[int, str, str]:
    """The narrowest power of two whose merges are cheap enough, in a quarter of L2 at most; in L1 where it fits there."""
    n = next(n for n in (64, 128, 256) if 1 / n <= MERGE_COST)
    while n > 32 and n * d_pair * size > spec.l2_bytes // 4:
        n //= 2
    merge = f"the merge costs {1 / n:.1%} of the multiplications"
    # a strip holds Q and O (rows × d each) and its scores (rows × block_k)
    need = n * d_pair * size + rows * (d_pair + n) * size
    if need <= spec.l1d_bytes:
        return n, "L1", f"block_k {n}: K, V and a strip take {_kib(need)} of {_kib(spec.l1d_bytes)} L1; {merge}"
    return n, "L2", (
        f"block_k {n}: K, V and a strip take {_kib(need)}, more than {_kib(spec.l1d_bytes)} L1, so tiles are packed and "
        f"streamed from L2 ({_kib(n * d_pair * size)}); {merge}"
    )  # fmt: skip


def _block_q(spec: DeviceSpec, rows: int, block_k: int, d_pair: int, size: int, packed: bool) -> tuple[int, str]:
    """The fewest rows that pay for bringing in a K/V tile, within half of L2."""
    lanes_per_cycle = spec.lanes(size) * spec.fma_per_cycle
    strip_cycles = rows * block_k * d_pair / lanes_per_cycle
    moved = block_k * d_pair * size * (2 if packed else 1)  # packing reads and writes
    refill_cycles = moved / spec.l2_bytes_per_cycle
    block_q, strips = rows, refill_cycles / strip_cycles / REFILL_COST
    while block_q / rows < strips and 2 * block_q <= MAX_BLOCK:
        block_q *= 2
    while block_q > rows and (block_q + block_k) * d_pair * size > spec.l2_bytes // 2:
        block_q //= 2
    cost = refill_cycles / (strip_cycles * block_q / rows)
    verb = "packing" if packed else "loading"
    return block_q, f"block_q {block_q}: {verb} a K/V tile costs {cost:.1%} of the multiplications that use it"


def _parallel(
    spec: DeviceSpec, heads: int, lengths: tuple[int, int], blocks: tuple[int, int], rows: int
) -> tuple[int, int, tuple[str, ...]]:
    """Smaller blocks, then splits over the keys, until every core has work."""
    (length, keys), (block_q, block_k) = lengths, blocks
    length, heads = max(1, length), max(1, heads)
    reasons: list[str] = []
    if block_q > _round_up(length, rows):
        block_q = _round_up(length, rows)
        reasons.append(f"block_q {block_q}: no more than {length} queries")
    before = block_q
    while block_q // 2 >= rows and block_q % (2 * rows) == 0 and heads * -(-length // block_q) < 2 * spec.cores:
        block_q //= 2
    if block_q < before:
        reasons.append(f"block_q {before} → {block_q}: {heads} heads must occupy {spec.cores} cores")
    tasks = heads * -(-length // block_q)
    splits = 1
    if tasks < spec.cores:
        splits = max(1, min(-(-spec.cores // tasks), -(-keys // (2 * block_k))))
    if splits > 1:
        reasons.append(f"{splits} splits over the keys: {tasks} tasks would leave {spec.cores - tasks} cores idle")
    return block_q, splits, tuple(reasons)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _kib(size: int) -> str:
    return f"{size / KiB:g} KiB"
