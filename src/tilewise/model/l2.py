"""What the shared cache takes off the memory: DRAM bytes of a GPU kernel.

Blocks of one key head run side by side and pass over its K and V together, so each tile comes from memory once for
all of them. A head with more Q tiles than fit the device at once takes several rounds; in later rounds the tiles that
have left the cache meanwhile come from memory again. So do some where blocks of a head begin at different places of its
stream, as those of dK and dV under a causal mask: they are never at the same tile at the same time.
"""

from __future__ import annotations

import numpy as np

from tilewise.hardware.spec import DeviceSpec
from tilewise.model.grid import even, grid_of
from tilewise.model.replay import Played, played
from tilewise.model.schedules import Traffic, compulsory, stat_size
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem


def capacity(spec: DeviceSpec) -> int:
    """Bytes that stay in the cache for all units: chips with two partitions keep a copy in each."""
    size = spec.l2_bytes // (2 if spec.arch in ("sm_80", "sm_90", "sm_100") else 1)
    return max(size, spec.l3_bytes)


def streamed(problem: Problem, tile: TilePlan) -> int:
    """Bytes that every block of one key head passes over."""
    size = problem.itemsize
    if tile.holds_keys:
        per_row = (problem.head_dim + problem.head_dim_v) * size + 2 * stat_size(problem)
        return problem.group * problem.seqlen_q * per_row
    return problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.kv_itemsize


def blocks_of(problem: Problem, tile: TilePlan) -> int:
    """Blocks of one key head."""
    if tile.holds_keys:
        return -(-problem.seqlen_k // tile.block_k)
    if tile.pack_gqa:
        return -(-problem.seqlen_q * problem.group // tile.block_q) * tile.splits
    return -(-problem.seqlen_q // tile.block_q) * problem.group * tile.splits


def rounds(problem: Problem, tile: TilePlan, resident: int) -> int:
    """How often the blocks of one key head fill the device."""
    return max(1, -(-blocks_of(problem, tile) // max(1, resident)))


REREAD = 1 / 4
"""Of a stream whose blocks begin at different places, the part that is read again, per unit of what passes beyond the cache's
capacity. Measured, not derived: dK and dV on an H200, causal, 4k and 8k tokens (`benchmarks/results/`). Were the cache to drop
what was unused for longest, nothing would be read again."""


STAYS = 0.69
"""Of a cache in two partitions, the part that holds different bytes where the order of reads is played through: the rest of an
H200's 60 MiB is held twice. Fitted, with `replay.WAYS`, to the DRAM reads of 70 kernels, 2026-11-19 (`benchmarks/results/`)."""


def scattered(problem: Problem, tile: TilePlan, spec: DeviceSpec, resident: int) -> float:
    """The part of the stream read again because blocks of one head begin at different places of it."""
    if not tile.holds_keys or not problem.seqlen_q or not problem.seqlen_k:
        return 0.0
    fraction, total = 0.0, 0
    for group, count in grid_of(problem, tile.block_q, tile.block_k).kv_heads():
        first = group[0].visited.argmax(axis=0)
        steps = np.stack([head.by_col * head.count for head in group]).sum(axis=0)  # [Tc]
        total += count
        if int(first.min()) == int(first.max()) or not steps.sum():
            continue
        # in the time of the longest block so many key heads pass through the device, each with what it streams, reads and writes
        heads = min(resident * steps.max() / steps.sum(), problem.batch * problem.kv_heads)
        rows = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.itemsize
        passing = heads * (streamed(problem, tile) + 2 * rows)
        fraction += count * REREAD * max(0.0, 1.0 - capacity(spec) / passing)
    return fraction / max(1, total)


def dram(problem: Problem, tile: TilePlan, moved: Traffic, spec: DeviceSpec, resident: int) -> Traffic:
    """DRAM bytes of a pass whose tile bytes are `moved`, with `resident` blocks on the device at once.

    Between the bytes needed once and the tile bytes: what is streamed again is read again as far as it does not fit.
    """
    problem = even(problem)
    bytes_once = streamed(problem, tile)
    missing = max(0.0, 1.0 - capacity(spec) / bytes_once) if bytes_once else 0.0
    again = (rounds(problem, tile, resident) - 1) * missing
    if not tile.persistent:
        again += scattered(problem, tile, spec, resident)
    factors = played(problem, tile, spec.units, STAYS * spec.l2_bytes) or Played(1.0 + again, 1.0 + again)
    least_moved = compulsory(problem, tile)
    once = least_moved.reads
    repeated = ("Q", "dO", "LSE", "delta") if tile.holds_keys else ("K", "V")
    result = Traffic()
    for name, size in moved.reads.items():
        least = once.get(name, size)
        factor = factors.stream if name in repeated else 1.0
        result.read(name, min(size, round(least * factor)))
    for name, size in moved.writes.items():
        # what is added up stays in the cache while it is
        least = min(size, least_moved.writes.get(name, size)) if name.endswith(" acc") else size
        result.write(name, least)
        if name == "dQ acc":  # added to where it lies: it comes from memory to the cache, and no further
            result.read(name, min(size, round(least * factors.sums)))
    return result
