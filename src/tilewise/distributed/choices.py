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
FEWEST_TRIED, MOST_TRIED = 50, 20_000
MOST_STARTS = 12
FEW_GROUPS = 8_000
"""Ways from which an even choice is looked for, fewer if there are more groups than these for all of them."""
LEVELLED, SWAPPED = 12_000, 60_000
"""Up to so many ways of all groups they are levelled, and changed again and again, two at a time."""


MOST_WEIGHTS, HEAVIER = 12, 2.0
"""How often the excess of ranks is made dearer, and by how much."""
PASSES, MOST_PASSES = 120, 8
"""Groups that are changed in turn for each of these, and how often at most."""
LIGHTEST, EASED, WEIGHTS = 0.5, 20_000, (6, 24)
"""Of `eased`: the first weight of the excess, how many groups are changed about, and how many weights are tried."""
LEAST = 0.5
"""Bytes below which nothing is saved."""


class Way(NamedTuple):
    """For which parts between ranks queries travel, and what that means for each group of them: two ranks and a component."""

    by_query: Bools
    bytes: Floats
    moved: Floats
    """Area that the keys' rank computes; the queries' rank computes the rest."""


class Ends(NamedTuple):
    """The two ranks of each group, and the area of each rank if no query travels.

    levelled: whether ranks that are uneven then must be made even by queries that travel.
    largest: the area of the fullest rank if no query travels, or if all do.
    """

    q_rank: Ints
    k_rank: Ints
    areas: Floats
    levelled: bool = False
    largest: float = 0.0

    @property
    def most(self) -> float:
        """The area that a rank may have."""
        even = float(self.areas.mean()) * (1 + UNEVEN)
        return even if self.levelled else max(self.largest, even)

    def loads(self, moved: Floats) -> Floats:
        """The area of each rank."""
        ranks = len(self.areas)
        return np.asarray(self.areas + np.bincount(self.k_rank, moved, ranks) - np.bincount(self.q_rank, moved, ranks))


def even_choice(
    ends: Ends, ways: list[Way], priced: Callable[[Floats], Way | None], rounds: int
) -> tuple[list[Way], Ints] | None:
    """Ways, and which of them each group takes, so that no rank has too much; None if none is found.

    ways: to begin with; in the first of them no query travels. priced: the best way if each unit of area costs so much more at
    the keys' rank than at the queries'. rounds: how many prices may be tried.
    """
    ways, most = list(ways), ends.most
    fits = [float(way.bytes.sum()) for way in ways if ends.loads(way.moved).max() <= most]
    fewest = min(fits, default=max(float(way.bytes.sum()) for way in ways))
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
    tries = [table.repaired(np.full(table.groups, start)) for start in {0, 1, *starts}]
    if table.groups * len(ways) <= LEVELLED:
        tries += [table.levelled(choice) for choice in (table.bytes.argmin(axis=0), np.zeros(table.groups, np.int64))]
    found = [choice for choice in tries if choice is not None]
    for choice in found if table.small else sorted(found, key=table.sent)[:1]:
        while table.change_one(choice) and table.small:
            pass
    return (ways, table.improved(min(found, key=table.sent))) if found else None


def polished(ends: Ends, ways: list[Way], choice: Ints) -> Ints | None:
    """A choice that is nearly even made so, and better; None if that is not found."""
    table = _Table(ends, ways)
    found = [one for one in (table.repaired(choice.copy()), table.levelled(choice.copy())) if one is not None]
    return table.improved(min(found, key=table.sent)) if found else None


def eased(ends: Ends, ways: list[Way], limit: float) -> Ints:
    """A choice of at most `limit` bytes, as even as it is found; the one of fewest bytes if there is none."""
    return _Table(ends, ways).eased(limit)


class _Table:
    """Ways as tables [way, group]."""

    def __init__(self, ends: Ends, ways: list[Way]) -> None:
        self.ends = ends
        self.bytes, self.moved = (np.array([getattr(way, name) for way in ways]) for name in ("bytes", "moved"))
        self.groups = self.bytes.shape[1]
        self.small = self.bytes.size <= SWAPPED
        self.at = np.arange(self.groups)
        ranks = range(len(ends.areas))
        self.opposite = self._opposite()
        self.of_rank = [np.flatnonzero((ends.q_rank == rank) | (ends.k_rank == rank)) for rank in ranks]

    def _opposite(self) -> list[tuple[int, int]]:
        """Groups of the same two ranks in opposite directions; none where there are too many."""
        if not self.small:
            return []
        held: dict[tuple[int, int], list[int]] = {}
        for group, ranks in enumerate(zip(self.ends.q_rank.tolist(), self.ends.k_rank.tolist(), strict=True)):
            held.setdefault(ranks, []).append(group)
        return [(a, b) for (q, k), groups in held.items() if q < k for a in groups for b in held.get((k, q), [])]

    def sent(self, choice: Ints) -> float:
        return float(self.bytes[choice, self.at].sum())

    def loads(self, choice: Ints) -> Floats:
        return self.ends.loads(self.moved[choice, self.at])

    def repaired(self, choice: Ints) -> Ints | None:
        """The choice with groups of the fullest rank changed, at the least bytes for what that makes more even, until no rank
        has too much; None if that does not come to an end."""
        ends, most, loads = self.ends, self.ends.most, self.loads(choice)
        for _ in range(min(2 * self.groups + FEWEST_TRIED, MOST_TRIED)):
            rank = int(loads.argmax())
            if loads[rank] <= most:
                return choice
            own = self.of_rank[rank]
            if not len(own):
                return None
            q, k, now = ends.q_rank[own], ends.k_rank[own], choice[own]
            change = self.moved[:, own] - self.moved[now, own]
            after = np.maximum(loads[k] + change - most, 0) + np.maximum(loads[q] - change - most, 0)
            less = np.maximum(loads[k] - most, 0) + np.maximum(loads[q] - most, 0) - after
            cost = self.bytes[:, own] - self.bytes[now, own]
            score = np.where(cost > 0, cost / np.maximum(less, 1e-9), -less)
            score = np.where(less > 0, score, np.inf)
            way, place = np.unravel_index(int(score.argmin()), score.shape)
            if not np.isfinite(score[way, place]):
                return None
            choice[own[place]] = way
            loads[k[place]] += change[way, place]
            loads[q[place]] -= change[way, place]
        return None

    def levelled(self, choice: Ints) -> Ints | None:
        """The choice with each group changed in turn to the way of fewest bytes and of the least excess, whose square costs more
        and more, until no rank has too much; None if that does not come to an end."""
        ends, most, loads = self.ends, self.ends.most, self.loads(choice)
        even = float(loads.mean()) * (1 + UNEVEN / 2)
        weight = self.sent(choice) / (len(loads) * even**2)
        order = [*range(self.groups), *reversed(range(self.groups))] * int(np.clip(PASSES // self.groups, 1, MOST_PASSES))
        for _ in range(MOST_WEIGHTS):
            for group in order:
                q, k = ends.q_rank[group], ends.k_rank[group]
                change = self.moved[:, group] - self.moved[choice[group], group]
                over = np.maximum(loads[k] + change - even, 0) ** 2 + np.maximum(loads[q] - change - even, 0) ** 2
                best = int((self.bytes[:, group] + weight * over).argmin())
                choice[group] = best
                loads[k] += change[best]
                loads[q] -= change[best]
            if loads.max() <= most:
                return choice
            weight *= HEAVIER
        return None

    def eased(self, limit: float) -> Ints:
        """The fewest bytes, then groups changed in turn as in `levelled`, until that would cost more than the limit."""
        ends, choice = self.ends, np.asarray(self.bytes.argmin(axis=0))
        best: Ints = choice.copy()
        loads, sent = self.loads(choice), self.sent(choice)
        even, most = float(loads.mean()), float(loads.max())
        weight, order = LIGHTEST * sent / (len(loads) * even**2), [*range(self.groups), *reversed(range(self.groups))]
        for _ in range(int(np.clip(EASED // self.groups, *WEIGHTS))):
            for group in order:
                q, k = ends.q_rank[group], ends.k_rank[group]
                change = self.moved[:, group] - self.moved[choice[group], group]
                over = np.maximum(loads[k] + change - even, 0) ** 2 + np.maximum(loads[q] - change - even, 0) ** 2
                way = int((self.bytes[:, group] + weight * over).argmin())
                loads[k] += change[way]
                loads[q] -= change[way]
                sent += self.bytes[way, group] - self.bytes[choice[group], group]
                choice[group] = way
                if sent <= limit and loads.max() < most:
                    best, most = choice.copy(), float(loads.max())
            if sent > limit:
                break
            weight *= HEAVIER**0.5
        return self._spent(best, limit)

    def _spent(self, choice: Ints, limit: float) -> Ints:
        """The choice with groups of the fullest rank changed for what bytes are left, while that makes it less full."""
        ends, loads, sent = self.ends, self.loads(choice), self.sent(choice)
        for _ in range(min(self.groups + FEWEST_TRIED, MOST_TRIED)):
            own = self.of_rank[int(loads.argmax())]
            if not len(own):
                break
            q, k, now = ends.q_rank[own], ends.k_rank[own], choice[own]
            change, cost = self.moved[:, own] - self.moved[now, own], self.bytes[:, own] - self.bytes[now, own]
            peak = np.where(sent + cost <= limit, np.maximum(loads[k] + change, loads[q] - change), np.inf)
            way, place = np.unravel_index(int(peak.argmin()), peak.shape)
            if peak[way, place] >= loads.max() - LEAST:
                break
            choice[own[place]] = way
            loads[k[place]] += change[way, place]
            loads[q[place]] -= change[way, place]
            sent += cost[way, place]
        return choice

    def improved(self, choice: Ints) -> Ints:
        """The choice with ways changed while that saves bytes and no rank gets too much: of one group, or of two groups that are
        between the same ranks, in opposite directions."""
        while self.small and (self._change_two(choice) or self.change_one(choice)):
            pass
        return choice

    def change_one(self, choice: Ints) -> bool:
        """Change the groups that save most, each to its best way that fits; whether any was."""
        ends, most, loads = self.ends, self.ends.most, self.loads(choice)
        change = self.moved - self.moved[choice, self.at]
        fits = (loads[ends.k_rank] + change <= most) & (loads[ends.q_rank] - change <= most)
        saved = np.where(fits, self.bytes[choice, self.at] - self.bytes, 0.0)
        best = saved.argmax(axis=0)
        saving = saved[best, self.at]
        order = np.argsort(-saving, kind="stable")
        some = False
        for group in order[: min(int((saving > LEAST).sum()), MOST_TRIED)].tolist():
            q, k, more = ends.q_rank[group], ends.k_rank[group], change[best[group], group]
            if loads[k] + more <= most and loads[q] - more <= most:
                loads[k] += more
                loads[q] -= more
                choice[group], some = best[group], True
        return some

    def _change_two(self, choice: Ints) -> bool:
        """Change two groups of opposite directions at once where that saves; whether any were."""
        ends, most, loads = self.ends, self.ends.most, self.loads(choice)
        some = False
        for there, back in self.opposite:
            q, k = ends.q_rank[there], ends.k_rank[there]
            more = (self.moved[:, there] - self.moved[choice[there], there])[:, None]
            more = more - (self.moved[:, back] - self.moved[choice[back], back])[None]
            cost = self.bytes[:, there][:, None] + self.bytes[:, back][None]
            fits = (loads[k] + more <= most) & (loads[q] - more <= most)
            cost = np.where(fits, cost, np.inf)
            one, other = np.unravel_index(int(cost.argmin()), cost.shape)
            if cost[one, other] < self.bytes[choice[there], there] + self.bytes[choice[back], back] - LEAST:
                choice[there], choice[back], some = one, other, True
                loads[k] += more[one, other]
                loads[q] -= more[one, other]
        return some
