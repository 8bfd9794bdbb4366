"""Ways in which pairs of ranks share their work: few bytes, and no rank has too much.

Ranks ask a price for each pair of the mask that they compute, higher the more they have. At given prices the best way is again a
minimum cut, and no even division has fewer bytes than its cost less the prices of even ranks: so it is known when to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tilewise.distributed.covers import Bools
from tilewise.distributed.intervals import Ints

Floats = np.ndarray[Any, np.dtype[np.float64]]
UNEVEN = 0.03
"""How much more area than the mean a rank may have so that bytes are saved."""
ENOUGH = 1.01
"""Times the least bytes of an even division."""
MOST_TRIED = 20_000
MOST_STARTS = 12
FEW_GROUPS = 8_000
"""Ways from which an even choice is looked for, fewer if there are more groups than these for all of them."""


class Way(NamedTuple):
    """For which parts between ranks queries travel, and what that means for each group of them: two ranks and a component."""

    by_query: Bools
    bytes: Floats
    moved: Floats
    """Area that the keys' rank computes; the queries' rank computes the rest."""


class Ends(NamedTuple):
    """The two ranks of each group, and the area of each rank if no query travels."""

    q_rank: Ints
    k_rank: Ints
    areas: Floats

    @property
    def most(self) -> float:
        """The area that a rank may have."""
        return max(float(self.areas.max()), float(self.areas.mean()) * (1 + UNEVEN))

    def loads(self, moved: Floats) -> Floats:
        """The area of each rank."""
        ranks = len(self.areas)
        return np.asarray(self.areas + np.bincount(self.k_rank, moved, ranks) - np.bincount(self.q_rank, moved, ranks))


def even_choice(ends: Ends, ways: list[Way], priced: Callable[[Floats], Way | None], rounds: int) -> tuple[list[Way], Ints]:
    """Ways, and which of them each group takes, so that no rank has too much.

    ways: to begin with; in the first of them no query travels. priced: the best way if each unit of area costs so much more at
    the keys' rank than at the queries'. rounds: how many prices may be tried.
    """
    ways, most = list(ways), ends.most
    fewest = min(float(way.bytes.sum()) for way in ways if ends.loads(way.moved).max() <= most)
    price = np.zeros(len(ends.areas))
    for _ in range(rounds):
        extra = price[ends.k_rank] - price[ends.q_rank]
        way = priced(extra)
        if way is None:
            break
        ways.append(way)
        loads, sent = ends.loads(way.moved), float(way.bytes.sum())
        if loads.max() <= most:
            fewest = min(fewest, sent)
        over = loads - most
        least = sent + float(price @ over)
        if fewest <= ENOUGH * least or not over.any():
            break
        price = np.maximum(price + over * (fewest - least) / float(over @ over), 0.0)
    table = _Table(ends, ways)
    count = int(np.clip(FEW_GROUPS // table.groups, 1, MOST_STARTS))
    starts = sorted(range(len(ways)), key=lambda number: float(ways[number].bytes.sum()))[:count]
    found = [choice for start in {0, 1, *starts} if (choice := table.repaired(np.full(table.groups, start))) is not None]
    return ways, min(map(table.improved, found), key=table.sent)


class _Table:
    """Ways as tables [way, group]."""

    def __init__(self, ends: Ends, ways: list[Way]) -> None:
        self.ends = ends
        self.bytes, self.moved = (np.array([getattr(way, name) for way in ways]) for name in ("bytes", "moved"))
        self.groups = self.bytes.shape[1]
        self.at = np.arange(self.groups)
        ranks = range(len(ends.areas))
        self.of_rank = [np.flatnonzero((ends.q_rank == rank) | (ends.k_rank == rank)) for rank in ranks]

    def sent(self, choice: Ints) -> float:
        return float(self.bytes[choice, self.at].sum())

    def loads(self, choice: Ints) -> Floats:
        return self.ends.loads(self.moved[choice, self.at])

    def repaired(self, choice: Ints) -> Ints | None:
        """The choice with groups of the fullest rank changed, at the least bytes for what that makes more even, until no rank
        has too much; None if that does not come to an end."""
        ends, most, loads = self.ends, self.ends.most, self.loads(choice)
        for _ in range(min(2 * self.groups, MOST_TRIED)):
            rank = int(loads.argmax())
            if loads[rank] <= most:
                return choice
            own = self.of_rank[rank]
            q, k, now = ends.q_rank[own], ends.k_rank[own], choice[own]
            change = self.moved[:, own] - self.moved[now, own]
            after = np.maximum(loads[k] + change - most, 0) + np.maximum(loads[q] - change - most, 0)
            less = np.maximum(loads[k] - most, 0) + np.maximum(loads[q] - most, 0) - after
            cost = self.bytes[:, own] - self.bytes[now, own]
            score = np.where(less > 0, cost / np.maximum(less, 1e-9), np.inf)
            way, place = np.unravel_index(int(score.argmin()), score.shape)
            if not np.isfinite(score[way, place]):
                return None
            choice[own[place]] = way
            loads[k[place]] += change[way, place]
            loads[q[place]] -= change[way, place]
        return None

    def improved(self, choice: Ints) -> Ints:
        """The choice with groups changed to their cheapest way, those that save most first, while no rank gets too much."""
        loads, most, moved = self.loads(choice), self.ends.most, self.moved[choice, self.at]
        cheapest = self.bytes.argmin(axis=0)
        saved = self.bytes[choice, self.at] - self.bytes.min(axis=0)
        order = np.argsort(-saved, kind="stable")
        for group in order[: min(int((saved > 0).sum()), MOST_TRIED)].tolist():
            q, k, way = self.ends.q_rank[group], self.ends.k_rank[group], cheapest[group]
            change = self.moved[way, group] - moved[group]
            if loads[k] + change <= most and loads[q] - change <= most:
                loads[k] += change
                loads[q] -= change
                choice[group] = way
        return choice
