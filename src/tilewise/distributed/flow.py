"""Work that flows between ranks until none has too much, at the fewest bytes: a flow of least cost whose costs are convex.

Each group of parts, which lie between two ranks, has ways to share its area between them. The lower hull of their bytes over the
area that moves says what the next bit of area costs. Excess goes along cheapest paths, over ranks that pass on as much as they
get, to ranks that have room. What is found lies between two ways of some groups. Where these are near each other, as of a
triangle, a way between them can be made. Where they are far, as of a rectangle, all of whose queries or keys travel, ways about
the nearer one are kept (all queries, and a few keys), and work flows again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import numpy as np

from tilewise.distributed.intervals import Ints

Floats = np.ndarray[Any, np.dtype[np.float64]]
MOST_STEPS = 300_000
"""Arcs that are looked at."""
LEAST = 1e-9
"""A part of the mean area that does not count."""
FAR = 0.3
"""Ways whose areas differ by so much of the group's are far from each other."""
NEAR = 0.15
"""Groups that are so near one of two such ways take it at once."""


class Between(NamedTuple):
    """Where a group is: between two ways, so far from the first one to the second."""

    low: int
    high: int
    part: float

    @property
    def sides(self) -> tuple[int, int]:
        """The nearer way and the other one."""
        return (self.low, self.high) if self.part < 0.5 else (self.high, self.low)


class _Arc(NamedTuple):
    """More area of a group moves (forth), or less: then its ranks have changed places."""

    group: int
    target: int
    forth: bool


class _Hull:
    """The ways of one group that are cheapest for their area, in the order of area; `at`: the area that moves."""

    def __init__(self, area: Floats, cost: Floats) -> None:
        self.all = area, cost
        kept: list[tuple[float, float, int]] = []
        for way in np.lexsort((cost, area)).tolist():
            new = float(area[way]), float(cost[way]), way
            if np.isinf(new[1]) or (kept and new[0] <= kept[-1][0]):
                continue
            while len(kept) > 1 and _above(kept[-2], kept[-1], new):
                kept.pop()
            kept.append(new)
        self.area, self.cost, self.ways = [k[0] for k in kept], [k[1] for k in kept], [k[2] for k in kept]
        self.reset()

    def reset(self) -> None:
        """To the cheapest way."""
        self.at = self.area[self.cost.index(min(self.cost))]

    def half(self, way: int, other: int) -> _Hull:
        """The ways that are nearer to one of two ways than to the other."""
        area, cost = self.all
        return _Hull(area, np.where(np.abs(area - area[way]) < np.abs(area - area[other]), cost, np.inf))

    def step(self, forth: bool) -> tuple[float, float]:
        """How far it is to the next way, more area moved or less, and the bytes of each unit until there."""
        high = bisect_right(self.area, self.at) if forth else bisect_left(self.area, self.at)
        if not 0 < high < len(self.area):
            return 0.0, 0.0
        slope = (self.cost[high] - self.cost[high - 1]) / (self.area[high] - self.area[high - 1])
        return (self.area[high] - self.at, slope) if forth else (self.at - self.area[high - 1], -slope)

    @property
    def bytes(self) -> float:
        """Where it is, between its ways."""
        return float(np.interp(self.at, self.area, self.cost))

    def place(self, least: float) -> Between:
        high = min(bisect_left(self.area, self.at - least), len(self.area) - 1)
        if not high or abs(self.area[high] - self.at) <= least:
            return Between(self.ways[high], self.ways[high], 0.0)
        part = (self.at - self.area[high - 1]) / (self.area[high] - self.area[high - 1])
        return Between(self.ways[high - 1], self.ways[high], part)


def _above(a: tuple[float, float, int], b: tuple[float, float, int], c: tuple[float, float, int]) -> bool:
    """Does b lie on or above the line from a to c?"""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def flowed(
    ends: tuple[Ints, Ints], areas: Floats, ways: tuple[Floats, Floats], whole: Floats, most: float
) -> list[Between] | None:
    """Where each group is; None where ranks cannot be made even so, or it takes too long.

    ends: the ranks of queries and keys of each group. areas: of the ranks if no query travels. ways: [way, group] the bytes, and
    the area that then is at the keys' rank. whole: the area of each group. most: the area that a rank may have.
    """
    cost, moved = ways
    hulls = [_Hull(moved[:, group], cost[:, group]) for group in range(cost.shape[1])]
    return _placed(_Ranks(ends, areas, moved, whole, most, [MOST_STEPS]), hulls)


def fewest(ends: tuple[Ints, Ints], areas: Floats, ways: tuple[Floats, Floats], most: float) -> float:
    """The bytes of a flow in which each group may be anywhere between its ways; infinite where ranks cannot be made even.

    See `flowed`, which sends more.
    """
    cost, moved = ways
    hulls = [_Hull(moved[:, group], cost[:, group]) for group in range(cost.shape[1])]
    found = _flow(_Ranks(ends, areas, moved, areas, most, [MOST_STEPS]), hulls)
    return sum(hull.bytes for hull in hulls) if found else float("inf")


class _Ranks(NamedTuple):
    """What does not change while work flows, but for the steps that are left."""

    ends: tuple[Ints, Ints]
    areas: Floats
    moved: Floats
    whole: Floats
    most: float
    steps: list[int]

    @property
    def least(self) -> float:
        return LEAST * float(self.areas.mean())


def _placed(ranks: _Ranks, hulls: list[_Hull]) -> list[Between] | None:
    """Where groups are, none of them between ways that are far from each other: one after another keeps to those about the
    nearer of the two, or about the other one if ranks cannot be made even then."""
    for hull in hulls:
        hull.reset()
    if not _flow(ranks, hulls):
        return None
    places, moved = [hull.place(ranks.least) for hull in hulls], ranks.moved
    far = [g for g, p in enumerate(places) if moved[p.high, g] - moved[p.low, g] > FAR * ranks.whole[g]]
    if not far:
        return places
    near = [group for group in far if abs(places[group].part - 0.5) > 0.5 - NEAR]
    first = max(far, key=lambda group: abs(places[group].part - 0.5))
    nearest, other = places[first].sides
    tries = [{first: (nearest, other)}, {first: (other, nearest)}]
    if len(near) > 1:
        tries.insert(0, {group: places[group].sides for group in near})
    for kept in tries:
        found = _placed(ranks, [hull.half(*kept[group]) if group in kept else hull for group, hull in enumerate(hulls)])
        if found is not None or ranks.steps[0] < 0:
            return found
    return None


def _flow(ranks: _Ranks, hulls: list[_Hull]) -> bool:
    """Moves along the hulls until no rank has too much; whether that came to an end."""
    loads, most, least = ranks.areas.tolist(), ranks.most, ranks.least
    leaving: list[list[_Arc]] = [[] for _ in loads]
    for group, (q, k) in enumerate(zip(*(side.tolist() for side in ranks.ends), strict=True)):
        loads[q] -= hulls[group].at
        loads[k] += hulls[group].at
        leaving[q].append(_Arc(group, k, True))
        leaving[k].append(_Arc(group, q, False))
    while max(loads) > most + least:
        path = _cheapest(ranks, loads, leaving, hulls)
        if path is None:
            return False
        first, arcs = path
        size = min(hulls[arc.group].step(arc.forth)[0] for arc in arcs)
        size = min(size, loads[first] - most, most - loads[arcs[-1].target])
        for arc in arcs:
            hulls[arc.group].at += size if arc.forth else -size
        loads[first] -= size
        loads[arcs[-1].target] += size
    return True


def _cheapest(
    ranks: _Ranks, loads: list[float], leaving: list[list[_Arc]], hulls: list[_Hull]
) -> tuple[int, list[_Arc]] | None:
    """The cheapest path from a rank that has too much, which is returned too, to one that has room.

    What an earlier path took may be given back, and gains then; but no circle does.
    """
    most, least, steps = ranks.most, ranks.least, ranks.steps
    distance = [0.0 if load > most + least else np.inf for load in loads]
    before: dict[int, tuple[int, _Arc]] = {}
    queue = [(0.0, rank) for rank, at in enumerate(distance) if not at]
    while queue:
        at, rank = heapq.heappop(queue)
        if at > distance[rank]:
            continue
        steps[0] -= len(leaving[rank])
        if steps[0] < 0:
            return None
        for arc in leaving[rank]:
            size, price = hulls[arc.group].step(arc.forth)
            if size > least and at + price < distance[arc.target] - LEAST:
                distance[arc.target] = at + price
                before[arc.target] = rank, arc
                heapq.heappush(queue, (at + price, arc.target))
    found = min(((at, rank) for rank, at in enumerate(distance) if loads[rank] < most - least), default=(np.inf, 0))
    if found[0] == np.inf:
        return None
    rank = found[1]
    arcs: list[_Arc] = []
    while rank in before and len(arcs) < len(loads):
        rank, arc = before[rank]
        arcs.insert(0, arc)
    return rank, arcs
