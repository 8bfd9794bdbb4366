"""The order in which programs take work tiles of unequal length: decided on the host, once for a shape.

A static schedule, longest first. Work tiles are queued: heads in clusters whose keys and values fit the L2 cache together, in a
cluster the longest tiles first. Each program takes the next from the queue when it is done with its last one; that is simulated
here, with the keys a tile visits as its time. The kernel reads the result. A dynamic scheduler (a counter in device memory) would
do without the estimate, at an atomic's latency a tile.
"""

from __future__ import annotations

import heapq

import numpy as np

from tilewise.backends.hopper.backward.config import QueriesConfig
from tilewise.backends.hopper.config import Config
from tilewise.backends.hopper.intervals import IntervalMask

OVERHEAD_KEYS = 100
"""What a tile costs beside its keys, in keys (H200: S 512 against 16k at head dim 64, two warpgroups)."""
EVEN = 1.001
"""Small clusters of heads are used unless others shorten the longest program by more than this."""
BEYOND_CACHE = 1.05
"""Clusters that the L2 cache does not hold must shorten it by more than this, at first. H200, 2026-11-19, dK and dV: where it was
shortened by less than 5 %, 0.79 to 1.05 of the speed, mostly less; d 128, 8 sequences of 2048, causal, by 1.4 %: 954 µs in the
place of 753. By 10 % (grouped heads, 4096): 1.04."""
UNEVEN, EXCHANGES, MOST_ROUNDS = 1.02, 400, 16
"""Tiles are exchanged between programs where the longest takes so many times the mean, so often at most, in so many rounds: where
there are more, tiles are short beside what a program takes."""
TAILS = (1, 2, 3)
"""Clusters at the end of the queue that may be mixed like one, for their short tiles to fill what the long ones leave."""


def visited_keys(mask: IntervalMask, tile: Config | QueriesConfig, queries: int, keys: int) -> np.ndarray:
    """Keys in the tiles that each query tile visits, int64 [blocks]."""
    return mask.visited(queries, keys, tile.BLOCK_M, tile.BLOCK_N) * tile.BLOCK_N


def best_order(keys: np.ndarray, heads: int, clusters: tuple[int, ...], programs: int, held: int) -> np.ndarray:
    """The order by the first of the clusters (small to large), with the last one, two or three of them as one, that leaves the
    programs about as even as any. `held`: the L2 cache holds what so many heads stream; the first cluster is taken for held."""
    balanced = int((keys + OVERHEAD_KEYS).sum()) * heads / programs
    held = max(held, clusters[0])
    best, best_mixes = tile_order(keys, heads, clusters[0], programs), clusters[0]
    ways = [(cluster, tail, min(heads, cluster * tail)) for cluster in dict.fromkeys(clusters) for tail in TAILS]
    for cluster, tail, mixes in sorted(ways, key=lambda way: way[2] > held):
        worth = BEYOND_CACHE if mixes > held >= best_mixes else EVEN
        if best[1] <= worth * balanced:
            break
        other = tile_order(keys, heads, cluster, programs, tail)
        if worth * other[1] < best[1]:
            best, best_mixes = other, mixes
    return best[0]


def tile_order(keys: np.ndarray, heads: int, cluster: int, programs: int, tail: int = 1) -> tuple[np.ndarray, int]:
    """Tiles by round and program, int32 [rounds + 1, programs], -1 for none: the last row is all -1; and the time of the longest.

    `keys` are those that each of a head's tiles visits. A tile's number counts through its head from the last to the first.
    `tail`: so many clusters at the end of the queue are mixed like one.
    """
    blocks = len(keys)
    longest_first = np.argsort(-keys[::-1], kind="stable")  # [blocks], counted from the last
    mixed = max(0, heads - tail * cluster)  # the first head of the clusters that are one
    head = np.arange(heads)
    parts = [head[:mixed].reshape(-1, 1, cluster), head[mixed:].reshape(1, 1, -1)]
    # [clusters · blocks · cluster]
    queue = np.concatenate([(part * blocks + longest_first[None, :, None]).reshape(-1) for part in parts])
    cost = keys[::-1][queue % blocks] + OVERHEAD_KEYS
    # one integer for a program's load and its number: the smallest is the program that is done first
    bits = programs.bit_length()
    done = list(range(programs))
    number = (1 << bits) - 1
    takers = np.array([heapq.heapreplace(done, done[0] + c) & number for c in (cost << bits).tolist()], dtype=np.int64)
    by_program = np.argsort(takers, kind="stable")
    counts = np.bincount(takers, minlength=programs)
    rounds = np.arange(len(queue)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.full((int(counts.max()) + 1, programs), -1, dtype=np.int32)
    order[rounds, takers[by_program]] = queue[by_program]
    return order, max(done) >> bits


def evened(order: np.ndarray, keys: np.ndarray, cluster: int) -> np.ndarray:
    """An order of `tile_order` with tiles exchanged, until the longest program is no longer than others or nothing shortens it.

    A tile takes the place, and about the time, of one that is at most `cluster` heads away, so the cache holds what it did. Few
    tiles of much the same length, as of a rank's part of a window, are what taking the longest first leaves 5 to 9 % uneven.
    Masks that bound only the last key keep the order in which their bytes were counted.
    """
    programs = order.shape[1]
    rounds, takers = np.nonzero(order >= 0)
    tiles = order[rounds, takers].astype(np.int64)
    if len(tiles) > MOST_ROUNDS * programs:
        return order
    cost, head = keys[::-1][tiles % len(keys)], tiles // len(keys)
    loads = np.bincount(takers, cost + OVERHEAD_KEYS, minlength=programs)
    if loads.max() <= UNEVEN * loads.mean():
        return order
    for _ in range(EXCHANGES):
        longest = int(loads.argmax())
        mine = np.flatnonzero(takers == longest)
        shorter = cost[mine, None] - cost  # by so much, and the other program longer
        allowed = (shorter > 0) & (np.abs(head[mine, None] - head) <= cluster)
        longer = np.where(allowed, np.maximum(loads[longest] - shorter, loads[takers] + shorter), np.inf)
        i, b = np.unravel_index(int(longer.argmin()), longer.shape)
        if longer[i, b] >= loads[longest] or loads[longest] <= EVEN * loads.mean():
            break
        a = mine[i]
        loads[[longest, takers[b]]] += np.array([-1, 1]) * shorter[i, b]
        for each in (tiles, cost, head):
            each[[a, b]] = each[[b, a]]
    found = order.copy()
    found[rounds, takers] = tiles
    return found
