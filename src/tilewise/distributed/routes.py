"""What travels between ranks: for each part of the mask the cheaper of moving keys and values, or queries and their results.

The choice is made for each pair of ranks and each component of the mask (a document, say: tokens that see only each other)
for itself, by the bytes of the forward and the backward pass. What no query sees never travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tilewise.distributed.coverage import Coverage, Parts
from tilewise.distributed.intervals import Intervals, Ints, joined, pieces
from tilewise.distributed.schedule import RowBytes
from tilewise.distributed.shards import Shards

Bools = np.ndarray[Any, np.dtype[np.bool_]]
UNEVEN = 0.03
"""How much more area than the mean a rank may have so that bytes are saved."""
MOST_TRIED = 20_000


@dataclass(frozen=True, eq=False)
class Routes:
    """The parts of a mask over shards, and by which route each is computed.

    parts: rectangles within one piece of queries and one of keys. q_rank, k_rank: who holds these.
    by_query: whether the queries travel to the keys' rank, which computes the part then.
    """

    shards: Shards
    parts: Parts
    q_rank: Ints
    k_rank: Ints
    by_query: Bools

    @property
    def own(self) -> Bools:
        """Parts for which nothing travels."""
        return np.asarray(self.q_rank == self.k_rank)

    @cached_property
    def rank(self) -> Ints:
        """Who computes each part."""
        return np.where(self.by_query, self.k_rank, self.q_rank)

    @cached_property
    def areas(self) -> Ints:
        """Pairs that each rank computes."""
        return np.bincount(self.rank, self.parts.area, self.shards.ranks).astype(np.int64)

    def pair(self, source: Ints, target: Ints) -> Ints:
        """One number for two ranks."""
        return np.asarray(target * self.shards.ranks + source)

    @cached_property
    def keys(self) -> tuple[Intervals, Ints]:
        """Keys that travel, by target, cut into pieces of one source; and the source of each."""
        far = ~self.own & ~self.by_query
        wanted = joined(self.q_rank[far], self.parts.k0[far], self.parts.k1[far])
        cut, _, piece = pieces(wanted, self.shards.bounds)
        return cut, self.shards.rank[piece]

    @cached_property
    def queries(self) -> tuple[Intervals, Ints]:
        """Queries that travel, by target, cut likewise; and the source of each. Their results return."""
        far = ~self.own & self.by_query
        wanted = joined(self.k_rank[far], self.parts.q0[far], self.parts.q1[far])
        cut, _, piece = pieces(wanted, self.shards.bounds)
        return cut, self.shards.rank[piece]

    def sent(self, row: RowBytes, *, backward: bool = False) -> Ints:
        """Bytes that each rank sends in one pass."""
        total = np.zeros(self.shards.ranks, np.int64)
        for (moved, source), what in ((self.keys, "kv"), (self.queries, "q")):
            there, back = row.sent(what, backward=backward), row.returned(what, backward=backward)  # type: ignore[arg-type]
            if what == "q":
                back = row.sent("out", backward=backward)
            np.add.at(total, source, moved.sizes * there)
            np.add.at(total, moved.group, moved.sizes * back)
        return total


def routes(shards: Shards, seen: Coverage, row: RowBytes, *, even: bool = False) -> Routes:
    """The parts of a mask over shards, each by its cheaper route; with `even` only as far as ranks stay even in area."""
    parts = seen.parts(shards.bounds)
    q_rank, k_rank = (shards.rank[np.searchsorted(shards.bounds, at, side="right") - 1] for at in (parts.q0, parts.k0))
    found = Routes(shards, parts, q_rank, k_rank, np.zeros(len(q_rank), bool))
    far = np.flatnonzero(q_rank != k_rank)
    if not len(far):
        return found
    component = np.searchsorted(seen.borders, parts.q0[far], side="right") - 1
    ends = (q_rank[far] * shards.ranks + k_rank[far]) * len(seen.borders) + component
    number, group = np.unique(ends, return_inverse=True)
    of_keys, of_queries = (
        np.bincount(rows.group, rows.sizes, len(number))
        for rows in (joined(group, parts.k0[far], parts.k1[far]), joined(group, parts.q0[far], parts.q1[far]))
    )
    saved = of_keys * row.route("kv") - of_queries * row.route("q")
    cheaper = saved > 0
    if even and cheaper.any():
        area = np.bincount(group, parts.area[far], len(number))
        pair = number // len(seen.borders)
        cheaper = _even(found.areas, saved, area, pair // shards.ranks, pair % shards.ranks)
    by_query = found.by_query.copy()
    by_query[far] = cheaper[group]
    return Routes(shards, parts, q_rank, k_rank, by_query)


def _even(areas: Ints, saved: Ints, area: Ints, q_rank: Ints, k_rank: Ints) -> Bools:
    """Which work may go to the rank of its keys, those that save most first, while no rank has too much.

    Work that goes both ways weighs nothing, so all of it is tried at once before it is tried one by one.
    """
    most = max(float(areas.max()), float(areas.mean()) * (1 + UNEVEN))
    chosen = saved > 0
    load = areas - np.bincount(q_rank, area * chosen, len(areas)) + np.bincount(k_rank, area * chosen, len(areas))
    if load.max() <= most:
        return chosen
    load, chosen = areas.astype(float), np.zeros(len(saved), bool)
    order = np.argsort(-saved, kind="stable")
    for number in order[: min(int((saved > 0).sum()), MOST_TRIED)].tolist():
        if load[k_rank[number]] + area[number] <= most:
            load[k_rank[number]] += area[number]
            load[q_rank[number]] -= area[number]
            chosen[number] = True
    return chosen
