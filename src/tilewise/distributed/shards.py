"""Which tokens each rank holds: as many as every other, to a chunk, and as much mask area.

`balanced` looks at the mask. Contiguous parts are taken where they are even, as under a window. Otherwise ranks are filled with
components, tokens that see only each other, such as a document: whole ones where they fit, so that nothing of them travels,
and one that is cut. One component alone, as under a causal mask, is cut for every rank into a head and a tail.

The area of tokens is that of their queries, which is even if keys travel. Where queries are the cheaper ones to travel, ranks may
be filled by the area of their keys instead: with windows wide for the ranks it is even then if all queries travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.distributed.choices import UNEVEN
from tilewise.distributed.coverage import Coverage
from tilewise.distributed.intervals import Ints
from tilewise.distributed.schedule import Chunk

SHARDS = ("balanced", "contiguous", "head_tail", "zigzag")
ZIGZAG = 8
"""Chunks of a rank under "zigzag"."""
EVEN = 0.02
"""How much more area than the mean a rank may have where it can be had."""
LEVELLED = 0.35
"""How much more area than the mean contiguous parts may have so that it is tried to level them by queries that travel."""
SLACK = 0.005
"""How far the area of a cut may be off, as a part of what the rank still wants."""
FEW = 4
"""Components that are tried for a cut."""

Piece = tuple[int, int, int]
"""Tokens [start, end) of the axis and their rank."""


@dataclass(frozen=True, eq=False)
class Shards:
    """A partition of the tokens of all sequences, which stand on one axis one after another.

    bounds: where its pieces start, in order, and the number of tokens at the end; a piece lies in one sequence.
    rank: of each piece; neighbours of one sequence have different ranks.
    """

    lengths: tuple[int, ...]
    ranks: int
    bounds: Ints
    rank: Ints

    @property
    def starts(self) -> Ints:
        """Where each sequence starts on the axis."""
        return np.cumsum((0, *self.lengths))

    @property
    def tokens(self) -> Ints:
        """Tokens of each rank."""
        return np.bincount(self.rank, np.diff(self.bounds), self.ranks).astype(np.int64)

    def chunks(self, first: Ints, past: Ints) -> list[Chunk]:
        """Intervals of the axis as chunks of their sequences."""
        starts = self.starts
        sequence = np.searchsorted(starts, first, side="right") - 1
        at = starts[sequence]
        columns = (sequence, first - at, past - at)
        return [Chunk(*place) for place in zip(*(column.tolist() for column in columns), strict=True)]

    def of_rank(self) -> tuple[tuple[Chunk, ...], ...]:
        """The chunks of each rank, in the order of its shard."""
        held: list[list[Chunk]] = [[] for _ in range(self.ranks)]
        for rank, chunk in zip(self.rank.tolist(), self.chunks(self.bounds[:-1], self.bounds[1:]), strict=True):
            held[rank].append(chunk)
        return tuple(map(tuple, held))

    def areas(self, seen: Coverage) -> Ints:
        """Pairs of the queries that each rank holds."""
        sums = np.concatenate([[0], np.cumsum(seen.counts)])
        return np.bincount(self.rank, np.diff(sums[self.bounds]), self.ranks).astype(np.int64)


def partition(lengths: Sequence[int], ranks: int, cuts: Ints, rank: Ints) -> Shards:
    """Shards from cuts (0 … tokens) and the rank of each piece between them; pieces are parted where sequences end."""
    starts = np.cumsum((0, *lengths))
    bounds = np.unique(np.concatenate([cuts, starts]))
    owner = rank[np.searchsorted(cuts, bounds[:-1], side="right") - 1]
    new = np.concatenate([[True], (owner[1:] != owner[:-1]) | np.isin(bounds[1:-1], starts)])[: len(owner)]
    return Shards(tuple(lengths), ranks, np.append(bounds[:-1][new], bounds[-1]), owner[new])


def dealt(lengths: Sequence[int], ranks: int, each: int = 1) -> Shards:
    """`each` equal chunks for each rank, dealt forth and back. One is contiguous, two are head and tail."""
    quotas = np.diff(_cuts(0, sum(lengths), ranks)).tolist()
    sizes = np.array([np.diff(_cuts(0, quota, each)) for quota in quotas])  # [ranks, each]
    turn, place = np.divmod(np.arange(ranks * each), ranks)
    rank = np.where(turn % 2, ranks - 1 - place, place)
    return partition(lengths, ranks, np.concatenate([[0], np.cumsum(sizes[rank, turn])]), rank)


def candidates(
    kind: str, lengths: Sequence[int], ranks: int, seen: Coverage, cheap_queries: bool = False
) -> Iterator[list[Shards]]:
    """The shards by name; several where it depends on what would travel which are better, and after them others for where none
    of these are good.

    cheap_queries: whether they travel at fewer bytes than keys.
    """
    if kind != "balanced":
        yield [dealt(lengths, ranks, {"contiguous": 1, "head_tail": 2, "zigzag": ZIGZAG}[kind])]
        return
    contiguous = dealt(lengths, ranks)
    uneven = excess(contiguous.areas(seen))
    if uneven <= EVEN:
        yield [contiguous]
    tables = [seen.counts, seen.seeing] if cheap_queries else [seen.counts]
    if uneven <= LEVELLED and len(seen.borders) == 2:
        tables.reverse()
    even = [filled(lengths, ranks, seen, table) for table in tables[:1]]
    yield [contiguous, *even] if EVEN < uneven <= LEVELLED else even
    for table in tables[1:]:
        other = filled(lengths, ranks, seen, table)
        if not _alike(other, even[0]):
            yield [other]


def _alike(one: Shards, other: Shards) -> bool:
    return np.array_equal(one.bounds, other.bounds) and np.array_equal(one.rank, other.rank)


def excess(areas: Ints) -> float:
    """By how much the largest exceeds the mean, as a part of it."""
    mean = float(areas.mean())
    return float(areas.max()) / mean - 1 if mean else 0.0


def _cuts(start: int, end: int, parts: int) -> Ints:
    """Borders of equal parts, at multiples of a tile's side where the parts are long."""
    size = (end - start) / parts
    grain = 2 ** int(np.clip(np.log2(max(size, 1) / 64), 0, 7))
    inner = np.arange(1, parts) * (end - start) / parts
    rounded = np.round(inner / grain).astype(np.int64) * grain
    return np.concatenate([[start], start + rounded, [end]])


def _items(seen: Coverage, ranks: int) -> Ints:
    """Components as (start, end), small neighbours together."""
    borders = seen.borders
    least = max(1, seen.tokens // (64 * ranks))
    keep, last = [0], 0
    sizes = np.diff(borders)
    if len(sizes) and sizes.min() >= least:
        return np.stack([borders[:-1], borders[1:]], axis=1)
    for at in borders[1:].tolist():
        if at - last >= least:
            keep.append(at)
            last = at
    if keep[-1] != seen.tokens:
        keep.append(seen.tokens)
    return np.stack([np.array(keep[:-1], np.int64), np.array(keep[1:], np.int64)], axis=1)


def filled(lengths: Sequence[int], ranks: int, seen: Coverage, areas: Ints | None = None) -> Shards:
    """Rank after rank filled with equal tokens and equal area (areas: of each token; None: that of its query).

    A rank takes whole components while they fit, and at last a part of one: some of its head and some of its tail, in such
    a proportion that the area is met (under a causal mask the tail weighs more). What is left of it is for later ranks.
    """
    sums, items = np.concatenate([[0], np.cumsum(seen.counts if areas is None else areas)]), _items(seen, ranks)
    pieces = _pieces(items, sums, ranks)
    uneven = _unevenness(pieces, sums, ranks)
    if len(items) == 1 and uneven > UNEVEN:  # light at both ends: two, each light at one
        halves = np.array([[0, seen.tokens // 2], [seen.tokens // 2, seen.tokens]])
        other = _pieces(halves, sums, ranks)
        pieces = other if _unevenness(other, sums, ranks) < uneven else pieces
    table = np.array(sorted(pieces), np.int64).reshape(-1, 3)
    return partition(lengths, ranks, np.append(table[:, 0], seen.tokens), table[:, 2])


def _unevenness(pieces: list[Piece], sums: Ints, ranks: int) -> float:
    start, end, rank = np.array(pieces, np.int64).reshape(-1, 3).T
    return excess(np.bincount(rank, sums[end] - sums[start], ranks))


def _pieces(items: Ints, sums: Ints, ranks: int) -> list[Piece]:
    """What each rank takes of the components."""
    left, tokens = _Components(items, sums), len(sums) - 1
    pieces: list[Piece] = []
    done = 0
    for rank, room in enumerate(_quotas(tokens, ranks).tolist()):
        area = (float(sums[-1]) - done) / (ranks - rank)  # what earlier ranks missed is shared by the later ones
        while room:
            spans = left.take(room, area)
            weight = sum(int(sums[end] - sums[start]) for start, end in spans)
            room, area, done = room - sum(end - start for start, end in spans), area - weight, done + weight
            pieces += [(start, end, rank) for start, end in spans]
    return pieces


class _Components:
    """What is left of the components: contiguous, each with its area."""

    def __init__(self, items: Ints, sums: Ints) -> None:
        self.start, self.end, self.sums = items[:, 0].copy(), items[:, 1].copy(), sums

    def take(self, room: int, area: float) -> list[tuple[int, int]]:
        """A whole component, or a part of one, of at most `room` tokens, towards an area.

        The densest and the lightest tokens there are together meet any area that can be met; whichever of the two components
        is not longer than its part in that is taken whole. If both are longer, one component is cut, or both.
        """
        size, weight = self.end - self.start, self.sums[self.end] - self.sums[self.start]
        density = np.where(size > 0, weight / np.maximum(size, 1), np.nan)
        heavy, light = int(np.nanargmax(density)), int(np.nanargmin(density))
        part = _part_of_densest(room, area, size, weight, density)
        if 0 < size[heavy] <= part:
            return self._all(heavy)
        if 0 < size[light] <= room - part:
            return self._all(light)
        long = np.flatnonzero(size >= room)
        offs = [(*self._tail(number, room, area), number) for number in (heavy, *long[:FEW].tolist()) if size[number] >= room]
        if offs:
            tail, off, number = min(offs, key=lambda found: found[1])
            if off <= SLACK * area:
                return self._part(number, room, tail)
        spans: list[tuple[int, int]] = []
        if part:
            tail, _ = self._tail(heavy, part, float(density[heavy]) * part)
            spans = self._part(heavy, part, tail)
        if part < room:
            rest = area - float(sum(self.sums[end] - self.sums[start] for start, end in spans))
            tail, _ = self._tail(light, room - part, rest)
            spans += self._part(light, room - part, tail)
        return spans

    def _part(self, number: int, size: int, tail: int) -> list[tuple[int, int]]:
        start, end, head = int(self.start[number]), int(self.end[number]), size - tail
        self.start[number] += head
        self.end[number] -= tail
        spans = [(start, end)] if size == end - start else [(start, start + head), (end - tail, end)]
        return [(a, b) for a, b in spans if a < b]

    def _all(self, number: int) -> list[tuple[int, int]]:
        span = int(self.start[number]), int(self.end[number])
        self.end[number] = self.start[number]
        return [span]

    def _tail(self, number: int, room: int, area: float) -> tuple[int, float]:
        """How many of `room` tokens come from the end of a component so that the area is met, and how far off it is."""
        start, end = int(self.start[number]), int(self.end[number])
        grain = 2 ** int(np.clip(np.log2(max(room, 1) / 64), 0, 7))
        tail = np.append(np.arange(0, room, grain), room)
        if end - start == room:
            tail = tail[-1:]
        sums = self.sums
        off = np.abs(sums[start + room - tail] - sums[start] + sums[end] - sums[end - tail] - area)
        least = int(off.argmin())
        return int(tail[least]), float(off[least])


def _part_of_densest(room: int, area: float, size: Ints, weight: Ints, density: Any) -> int:
    """How many of `room` tokens come from the densest component, the others from the lightest ones, to meet an area."""
    order = np.argsort(density, kind="stable")  # those that are used up come last
    tokens, areas = (np.concatenate([[0], np.cumsum(column[order])]) for column in (size, weight))
    part = np.unique(np.linspace(0, room, 257).astype(np.int64))
    met = part * np.nanmax(density) + np.interp(room - part, tokens, areas)
    return int(part[np.abs(met - area).argmin()])


def _quotas(tokens: int, ranks: int) -> Ints:
    return np.diff(np.arange(ranks + 1) * tokens // ranks)
