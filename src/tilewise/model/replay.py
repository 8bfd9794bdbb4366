"""What the shared cache takes off the memory where the order of the work tiles is known: the order is played through.

Programs go through their work tiles side by side, a tile of the streamed side at each step. Between two reads of a tile lie
reads of others: so many bytes must the cache hold for the second read to find it (its stack distance). Sets are filled unevenly,
so near the capacity a read is lost with the probability that a set of so many ways overflows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tilewise.model.grid import Bools, Ints, grid_of
from tilewise.model.schedules import stat_size
from tilewise.model.tile import OrderOf, TilePlan, WorkOrder
from tilewise.problem import Problem

EDGES = 0.8
"""Steps that a work tile takes beside those of its stream."""
WAYS = 12
MOST_READS = 1 << 18
"""Of what is streamed. Longer plays end there: what comes after is as what came before."""


class Played(NamedTuple):
    """How often tiles come from memory: those that are streamed, and those of dQ's sums."""

    stream: float
    sums: float


class Reads(NamedTuple):
    """What programs touch, in order: which tile, its bytes, and whether it must come from memory if the cache has it not."""

    tile: Ints
    size: Ints
    read: Bools
    kind: Ints


STREAM, SUMS, HELD, RESULT = range(4)


def played(problem: Problem, tile: TilePlan, units: int, kept: float) -> Played | None:
    """None where the order is not known before the call; `kept`: bytes that the cache keeps for all units."""
    if tile.order is None or not problem.seqlen_q or not problem.seqlen_k:
        return None
    play = _remembered if problem.mask.static else _play
    return play(problem, tile, tile.order, units, kept)


def _play(problem: Problem, tile: TilePlan, order_of: OrderOf, units: int, kept: float) -> Played | None:
    order = order_of(problem, units)
    if order is None:
        return None
    grid = grid_of(problem, tile.block_q, tile.block_k)
    if grid.map.per_batch or grid.map.per_head:
        return None
    visited = next(grid.heads()).visited
    return _played(_reads(problem, tile, visited.T if tile.holds_keys else visited, order), kept)


_remembered = lru_cache(maxsize=512)(_play)
"""A play takes up to a second, and a plan, its table and its rivals ask for the same."""


def _played(reads: Reads, kept: float) -> Played:
    far, again = stack_distances(reads.tile, reads.size)
    lost = overflow(far / kept) * reads.size[again]
    factors = []
    for kind in (STREAM, SUMS):
        once = int(reads.size[~again & (reads.kind == kind)].sum())
        factors.append(1.0 + float(lost[reads.kind[again] == kind].sum()) / once if once else 1.0)
    return Played(*factors)


def overflow(filled: Any) -> Any:
    """How probably a read is lost behind bytes that fill the cache so many times: those of its set are spread as by chance."""
    mean = np.minimum(WAYS * np.asarray(filled, dtype=float), 700.0)
    term = np.exp(-mean)
    fits = term.copy()
    for n in range(1, WAYS):
        term = term * mean / n
        fits += term
    return 1.0 - fits


def stack_distances(tile: Ints, size: Ints) -> tuple[Any, Bools]:
    """For each touch but a tile's first: the bytes of the different tiles touched since its last. And which touches those are.

    They are those since whose own last touch lies before the tile's. Touches, ordered by their last, are halved by their place
    until each stands alone; at each halving those of a right half count what those of the left half have before them.
    """
    count = len(tile)
    by_tile = np.argsort(tile, kind="stable")
    same = tile[by_tile][1:] == tile[by_tile][:-1]
    last = np.full(count, -1, dtype=np.int64)
    last[by_tile[1:][same]] = by_tile[:-1][same]
    places = 1 << (count - 1).bit_length()
    sizes, before = (np.zeros(places) for _ in range(2))
    sizes[:count] = size
    at = np.concatenate([np.argsort(last, kind="stable"), np.arange(count, places)]).astype(np.int32)
    half = places // 2
    while half:
        left = at & half == 0
        passed = np.cumsum(np.where(left, sizes[at], 0.0).reshape(-1, 2 * half), axis=1).reshape(-1)
        halves = at[left], at[~left]
        before[halves[1]] += passed[~left]
        at = np.stack([part.reshape(-1, half) for part in halves], axis=1).reshape(-1)
        half //= 2
    again = last >= 0
    return (before[:count] - np.concatenate([[0], np.cumsum(size)])[last + 1])[again], again


def _reads(problem: Problem, tile: TilePlan, visited: Bools, order: WorkOrder) -> Reads:
    """`visited`: [tiles held, tiles streamed] of a head."""
    of_keys, group = tile.holds_keys, problem.group
    first, count = visited.argmax(axis=1), visited.sum(axis=1)
    blocks, width = visited.shape
    taken = _first_rounds(order.tiles, count * (group if of_keys else 1), blocks).T  # [programs, rounds]
    there = taken >= 0
    head, block = np.divmod(np.where(there, taken, 0), blocks)
    block = blocks - 1 - block if order.from_last else block
    steps = np.where(there, count[block] * (group if of_keys else 1), 0)
    takes = np.where(there, steps + EDGES, 0.0)
    begins = np.cumsum(takes, axis=1) - takes
    program, turn = np.indices(taken.shape)
    head, block, steps, begins, program, turn = (x[there] for x in (head, block, steps, begins, program, turn))
    of = np.repeat(np.arange(len(head)), steps)
    step = np.arange(len(of)) - np.repeat(np.cumsum(steps) - steps, steps)
    mine = count[block][of]
    if not of_keys:
        streamed, place = head[of] // group, mine - 1 - step if order.back else step
    elif order.heads_inside:
        streamed, place = head[of] * group + step % group, step // group
        place = np.where(turn[of] % 2 == 0, mine - 1 - place, place)
    else:
        streamed, place = head[of] * group + step // mine, step % mine
    stream = streamed * width + first[block][of] + place
    when = begins[of] + EDGES + step
    held = head * blocks + block
    sizes = tile_bytes(problem, tile)
    parts = [(STREAM, stream, when, program[of]), (HELD, held, begins, program)]
    if tile.pass_ == "backward":  # dQ is added up where its queries are
        parts.append((SUMS, stream, when + 0.01, program[of]))
    parts.append((RESULT, held, begins + EDGES + steps, program))
    kind = np.concatenate([np.full(len(part[1]), part[0]) for part in parts])
    tiles, when, program = (np.concatenate([part[n] for part in parts]) for n in (1, 2, 3))
    by_time = np.lexsort((program, when))
    kind = kind[by_time]
    return Reads(tiles[by_time] * 4 + kind, np.array(sizes)[kind], kind != RESULT, kind)


def _first_rounds(tiles: Any, steps: Ints, blocks: int) -> Any:
    """The rounds of work tiles that are played."""
    reads = np.cumsum(np.where(tiles >= 0, steps[np.where(tiles >= 0, tiles, 0) % blocks], 0).sum(axis=1))
    return tiles[: max(2, int(np.searchsorted(reads, MOST_READS)) + 1)]


def tile_bytes(problem: Problem, tile: TilePlan) -> tuple[int, int, int, int]:
    """Of a tile that is streamed, of its part of dQ's sums, of a tile that is held, and of its results."""
    size, stat = problem.itemsize, stat_size(problem)
    columns = problem.head_dim + problem.head_dim_v
    queries, keys = tile.block_q * (columns * size + 2 * stat), tile.block_k * columns * problem.kv_itemsize
    if tile.holds_keys:
        return queries, tile.block_q * problem.head_dim * stat, keys, keys
    if tile.pass_ == "backward_dq":
        return keys, 0, queries, tile.block_q * problem.head_dim * size
    return keys, 0, tile.block_q * problem.head_dim * size, tile.block_q * problem.head_dim_v * size
