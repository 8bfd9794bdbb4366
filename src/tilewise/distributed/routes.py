"""What travels between ranks: for each part of the mask the cheaper of moving keys and values, or queries and their results.

The choice is made for each pair of ranks and each component of the mask (a document, say: tokens that see only each other)
for itself, by the bytes of the forward and the backward pass: all keys, all queries, or some of both, the least that will do.
What no query sees never travels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from tilewise.distributed.choices import Ends, Floats, Way, eased, even_choice, polished
from tilewise.distributed.coverage import Coverage, Parts
from tilewise.distributed.covers import Bools, Graphs, moved_nodes
from tilewise.distributed.flow import Between, fewest, flowed
from tilewise.distributed.intervals import Intervals, Ints, joined, pieces
from tilewise.distributed.rows import OF_ROWS, least_of_rows
from tilewise.distributed.schedule import RowBytes
from tilewise.distributed.shards import LEVELLED, Shards, excess

MOST_CUTS = 1024
MOST_CELLS = 300_000
"""Where there are more, a pair of ranks moves all keys or all queries of a component."""
MOST_SPLITS, SPLIT_CELLS = 24, 5_000
"""Into how many parts a stretch is split where ranks would not be even, and how many cells there may be then."""
GRAIN, LONG = 128, 16
"""Stretches of so many grains or more are split at multiples of one, from their first token on."""
MOST_WAYS = 40_000
"""Ways of all groups in which some of their queries travel."""
PRICED_CELLS, ROUNDS = 50_000, (2, 16)
"""How many prices are tried, at least and at most; between them as many as have so many cells."""
MOST_FLOWING, FLOW_CELLS, FLOW_WAYS = 130, 20_000, 2_000
"""Groups between which work flows, and how many cells and ways of all of them there may be then."""
SPENT = 1.01
"""Times the bytes that may be sent: where a flow of any parts has more, it is not tried with the parts there are."""
REFINED, FINER, SPARED = 3, 16, 0.001
"""How often, and into how many parts each time, stretches are split whose routes lie between two ways; and how much of the mean
area is left for what is coarse nevertheless."""


@dataclass(frozen=True, eq=False)
class Routes:
    """The parts of a mask over shards, and by which route each is computed.

    parts: rectangles within one piece of queries and one of keys. q_rank, k_rank: who holds these.
    by_query: whether the queries travel to the keys' rank, which computes the part then.
    cuts: the pieces of the shards, and where else the axis is cut since parts go by different routes.
    """

    shards: Shards
    parts: Parts
    q_rank: Ints
    k_rank: Ints
    by_query: Bools
    cuts: Ints
    memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What predictions keep of their work on these routes."""

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


def routes(shards: Shards, seen: Coverage, row: RowBytes, *, even: bool = False, keys_only: bool = False) -> Routes:
    """The parts of a mask over shards, each by its cheaper route.

    even: queries travel only as far as ranks stay even in area, or where that takes more than `OF_ROWS` times the bytes of the
    rows that are needed, as even as it can be had for that. keys_only: they never do, since their rows of a bias would too.
    """
    cells = _Cells(shards, seen, shards.bounds)
    if keys_only or not len(cells.far):
        return cells.routes(np.zeros(len(cells.far), bool))
    fine, ends = cells, cells.ends()
    if len(cells.cuts) < len(ends) <= MOST_CUTS:
        finer = _Cells(shards, seen, ends)
        fine = finer if len(finer.far) <= MOST_CELLS else cells
    by_query = fine.cheapest(row, even)
    if by_query is None:
        limit = OF_ROWS * least_of_rows(cells.routes(np.zeros(len(cells.far), bool)), row, seen)
        found = fine.levelled(row, limit)
        fine = fine.split() if found is None else found[0]
        by_query = fine.even(row, limit) if found is None else found[1]
    needed = fine.needed(by_query)
    if len(needed) == len(fine.cuts):
        return fine.routes(by_query)
    coarse = _Cells(shards, seen, needed)
    return coarse.routes(fine.at(coarse, by_query))


class _Cells:
    """The parts of a mask cut at given places both ways, those between ranks in groups of two ranks and a component."""

    def __init__(self, shards: Shards, seen: Coverage, cuts: Ints) -> None:
        self.shards, self.seen, self.cuts = shards, seen, cuts
        self.parts = seen.parts(cuts)
        self.known: dict[RowBytes, list[Way]] = {}
        owner = (np.searchsorted(shards.bounds, at, side="right") - 1 for at in (self.parts.q0, self.parts.k0))
        self.q_rank, self.k_rank = (shards.rank[piece] for piece in owner)
        self.far = np.flatnonzero(self.q_rank != self.k_rank)
        self.between = self.parts.where(self.far)
        components = len(seen.borders)
        component = np.searchsorted(seen.borders, self.between.q0, side="right") - 1
        pair = self.q_rank[self.far] * shards.ranks + self.k_rank[self.far]
        number, self.group = np.unique(pair * components + component, return_inverse=True)
        self.pair = number // components
        self.row, self.column = (np.searchsorted(cuts, at, side="right") - 1 for at in (self.between.q0, self.between.k0))

    def routes(self, by_query: Bools) -> Routes:
        """With queries that travel for some of the parts between ranks."""
        whole = np.zeros(len(self.q_rank), bool)
        whole[self.far] = by_query
        return Routes(self.shards, self.parts, self.q_rank, self.k_rank, whole, self.cuts)

    def ends(self) -> Ints:
        """The cuts and where parts between ranks end."""
        return np.unique(np.concatenate([self.cuts, *self.between[:4]]))

    def split(self, most: int = SPLIT_CELLS) -> _Cells:
        """The same with each stretch between cuts in several, as far as there are few cells: routes may differ within it."""
        parts = min(MOST_SPLITS, int((most / len(self.group)) ** 0.5), MOST_CUTS // len(self.cuts))
        if parts < 2:
            return self
        first, size = self.cuts[:-1, None], np.diff(self.cuts)[:, None]
        grain = np.where(size >= LONG * GRAIN, GRAIN, 1)  # so that calls have whole tiles
        inner = (first + (size * _places(parts)[:-1] / grain + (grain > 1) / 2).astype(np.int64) * grain).ravel()
        return _Cells(self.shards, self.seen, np.unique(np.append(inner, self.cuts[-1])))

    def cheapest(self, row: RowBytes, even: bool) -> Bools | None:
        """For which parts between ranks queries travel, with the fewest bytes; None if ranks must be even, and are not so."""
        ways = self._whole(row)
        choice = np.array([way.bytes for way in ways]).argmin(axis=0)
        ends, moved = self._ends, np.array([way.moved for way in ways])[choice, np.arange(len(choice))]
        return self._taken(ways, choice) if not even or ends.loads(moved).max() <= ends.most else None

    def even(self, row: RowBytes, limit: float) -> Bools:
        """The same, with no rank that has too much, or no more bytes than the limit."""
        rounds = int(np.clip(PRICED_CELLS // len(self.group), *ROUNDS))
        parts = int(np.clip(min(4 * PRICED_CELLS / len(self.group), MOST_WAYS / len(self.pair) / 4), 1, MOST_SPLITS))
        ways = [*self._whole(row), *self._partial(row, parts)]
        for ends in (self._ends, self._ends._replace(levelled=False)):
            found = even_choice(ends, ways, partial(self._priced, row), rounds)
            if found is not None:
                sent = float(np.array([way.bytes for way in found[0]])[found[1], np.arange(len(found[1]))].sum())
                return self._taken(*found) if sent <= limit else self._taken(found[0], eased(ends, found[0], limit))
        raise AssertionError("keys alone are never too uneven")

    def levelled(self, row: RowBytes, limit: float) -> tuple[_Cells, Bools] | None:
        """The same for contiguous shards, by work that flows between ranks: cells, cut where that says, and their routes."""
        ends = self._ends
        if not ends.levelled or len(self.pair) > MOST_FLOWING:
            return None
        cells = self.split(FLOW_CELLS)
        ways = [*cells._whole(row), *cells._partial(row, int(np.clip(FLOW_WAYS / len(self.pair), 6, MOST_SPLITS)))]
        cheap = cells._fewest(ends, ways) <= SPENT * limit
        best = cells._level(row, ends, ways) if cheap else None
        if not cheap or (best is not None and best[0] > limit):
            return cells, cells._taken(ways, eased(ends, ways, limit))
        return None if best is None else best[1:]

    def _level(self, row: RowBytes, ends: Ends, ways: list[Way]) -> tuple[float, _Cells, Bools] | None:
        """Bytes, cells and their routes, where work flows until ranks are even; None where they cannot be made so."""
        cells, best = self, None
        for turn in range(REFINED):
            places = cells._flowed(ends, ways)
            if places is None:
                break
            choice = polished(ends, ways, np.array([place.sides[0] for place in places]))
            if choice is not None:
                sent = float(np.array([way.bytes for way in ways])[choice, np.arange(len(choice))].sum())
                found = sent, cells, cells._taken(ways, choice)
                best = found if best is None or sent < best[0] else best
            if best is not None and turn:
                break
            low, high = (cells._taken(ways, np.array([getattr(p, side) for p in places])) for side in ("low", "high"))
            cells, ways = cells._between(row, low, high)
        return best

    def _fewest(self, ends: Ends, ways: list[Way]) -> float:
        table = np.array([way.bytes for way in ways]), np.array([way.moved for way in ways])
        return fewest((ends.q_rank, ends.k_rank), ends.areas, table, ends.most)

    def _flowed(self, ends: Ends, ways: list[Way]) -> list[Between] | None:
        area = np.bincount(self.group, self.between.area).astype(np.float64)
        table = np.array([way.bytes for way in ways]), np.array([way.moved for way in ways])
        return flowed((ends.q_rank, ends.k_rank), ends.areas, table, area, ends.most - SPARED * float(ends.areas.mean()))

    def _between(self, row: RowBytes, low: Bools, high: Bools) -> tuple[_Cells, list[Way]]:
        """Cells and ways of more and more parts that go as in `high`, the others as in `low`."""
        first, past, of_keys = self._strips(low != high)
        inner = first[:, None] + ((past - first)[:, None] * np.arange(FINER + 1) / FINER).astype(np.int64)
        fine = _Cells(self.shards, self.seen, np.unique(np.concatenate([self.needed(low), self.needed(high), inner.ravel()])))
        low, high = self.at(fine, low), self.at(fine, high)
        at = np.where(of_keys[fine.group], fine.between.k0, fine.between.q0)
        ways = [fine._way(row, low), fine._way(row, high)]
        for cut in inner.T[1:-1]:
            before = at < cut[fine.group]
            ways += [fine._way(row, np.where(before, low, high)), fine._way(row, np.where(before, high, low))]
        return fine, ways

    def _strips(self, which: Bools) -> tuple[Ints, Ints, Bools]:
        """Of each group the stretch of queries in which some of its parts lie, or of keys (then the last is true) if that is
        fewer of them; an empty one if it has none."""
        groups, found = len(self.pair), []
        for side in "qk":
            first, past = np.full(groups, self.seen.tokens), np.zeros(groups, np.int64)
            np.minimum.at(first, self.group[which], getattr(self.between, side + "0")[which])
            np.maximum.at(past, self.group[which], getattr(self.between, side + "1")[which])
            found.append((np.minimum(first, past), past))
        (q0, q1), (k0, k1) = found
        of_keys = k1 - k0 < q1 - q0
        return np.where(of_keys, k0, q0), np.where(of_keys, k1, q1), of_keys

    def _whole(self, row: RowBytes) -> list[Way]:
        """No query travels, all do, and the fewest bytes for each group, where that is known."""
        if row not in self.known:
            none = np.zeros(len(self.group), bool)
            least = self._priced(row, np.zeros(len(self.pair)))
            self.known[row] = [self._way(row, none), self._way(row, ~none), *([] if least is None else [least])]
        return self.known[row]

    def _partial(self, row: RowBytes, parts: int) -> list[Way]:
        """Some of the queries of each group travel, or what is needed for some of its keys: the first or the last of them."""
        ways = []
        for group, edge, rows in self._nodes:
            total = np.bincount(group, rows, len(self.pair))
            before = np.cumsum(rows) - rows
            before = before - before[np.searchsorted(group, np.arange(len(self.pair)))][group]
            at = ((before + rows / 2) / total[group])[edge]  # where in its group a part lies, from 0 to 1
            for place in _places(parts)[1:-1].tolist():
                ways += [self._way(row, at < place), self._way(row, at > place)]
        return ways

    @cached_property
    def _ends(self) -> Ends:
        q_rank, k_rank = np.divmod(self.pair, self.shards.ranks)
        areas = np.bincount(self.q_rank, self.parts.area, self.shards.ranks)
        contiguous = len(self.shards.rank) == self.shards.ranks
        ends = Ends(q_rank, k_rank, areas.astype(np.float64), contiguous and excess(areas) <= LEVELLED)
        by_query = ends.loads(np.bincount(self.group, self.between.area, len(self.pair)).astype(np.float64))
        return ends._replace(largest=float(min(areas.max(), by_query.max())))

    def _taken(self, ways: list[Way], choice: Ints) -> Bools:
        return np.asarray(np.array([way.by_query for way in ways])[choice[self.group], np.arange(len(self.group))])

    def _way(self, row: RowBytes, by_query: Bools) -> Way:
        sent = self._rows(~by_query, "k") * row.route("kv") + self._rows(by_query, "q") * row.route("q")
        moved = np.bincount(self.group, self.between.area * by_query, len(self.pair))
        return Way(by_query, sent.astype(np.float64), moved.astype(np.float64))

    def _rows(self, which: Bools, side: str) -> Ints:
        """How many queries or keys some of the parts of each group have."""
        first, past = (getattr(self.between, side + end)[which] for end in "01")
        rows = joined(self.group[which], first, past)
        return np.bincount(rows.group, rows.sizes, len(self.pair)).astype(np.int64)

    @cached_property
    def _nodes(self) -> tuple[tuple[Ints, Ints, Ints], tuple[Ints, Ints, Ints]]:
        """Of queries, then of keys: the group of each node, the node of each part, and the rows of each node."""
        found = []
        for at, side in ((self.row, "q"), (self.column, "k")):
            node, edge = np.unique(self.group * len(self.cuts) + at, return_inverse=True)
            rows = joined(edge, *(getattr(self.between, side + end) for end in "01"))
            found.append((node // len(self.cuts), edge, np.bincount(rows.group, rows.sizes, len(node)).astype(np.int64)))
        return found[0], found[1]

    def _priced(self, row: RowBytes, extra: Floats) -> Way | None:
        """The way of fewest bytes if area costs `extra` bytes more at the rank of the keys; None if that is not known.

        Keys that stay bring all their area to their rank. So where that costs more, it counts as saved if they travel; where
        it costs less, so do queries that stay.
        """
        if len(self.group) > MOST_CELLS:
            return None
        costs = []
        for (group, edge, rows), what, sign in zip(self._nodes, ("q", "kv"), (-1, 1), strict=True):
            area = np.bincount(edge, self.between.area, len(group))
            saved = np.maximum(sign * extra[group], 0) * area
            costs.append(np.maximum(rows * row.route(what) - saved, 0).astype(np.int64))  # type: ignore[arg-type]
        (_, query, _), (group, key, _) = self._nodes
        moved = moved_nodes(Graphs(query, key, costs[0], costs[1], group))
        if moved is None:
            return None
        queries, keys = moved  # a part both sides of which travel is computed where that costs less
        return self._way(row, queries & (~keys | (extra[self.group] < 0)))

    def needed(self, by_query: Bools) -> Ints:
        """The cuts of the shards, and those on both sides of which routes differ."""
        keep = np.isin(self.cuts, self.shards.bounds)
        for mine, other in ((self.row, self.column), (self.column, self.row)):
            order = np.lexsort((mine, other, self.group))
            ways, at = by_query[order], mine[order]
            same = (np.diff(self.group[order]) == 0) & (np.diff(other[order]) == 0) & (np.diff(ways) != 0)
            keep[at[1:][same]] = True
        return np.asarray(self.cuts[keep])

    def at(self, coarse: _Cells, by_query: Bools) -> Bools:
        """The routes of larger parts, each of which is one of these or several of one route."""
        key = self.row * len(self.cuts) + self.column
        order = np.argsort(key, kind="stable")
        rows, columns = (np.searchsorted(self.cuts, at, side="right") - 1 for at in (coarse.between.q0, coarse.between.k0))
        return np.asarray(by_query[order[np.searchsorted(key[order], rows * len(self.cuts) + columns)]])


def _places(parts: int) -> Floats:
    """Where a whole from 0 to 1 is divided into parts; those at its ends are small, so that nearly all or a little can go."""
    return np.asarray((1 - np.cos(np.pi * np.arange(parts + 1) / parts)) / 2)
