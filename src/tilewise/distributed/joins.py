"""Works of a rank that one kernel call can compute together: fewer and larger calls, and fewer results to merge.

    contiguous     works whose rows and keys touch, if their hull has no pair that is not theirs
    all seen       works in which every row sees every key: rows that have the same keys, wherever they lie, are one call
    side by side   small ones of these, on a GPU: each is a document of one call, whose tiles fill the device together
    late rows      where few rows see keys of another rank (a window's edge), or few of its queries come, they are computed
                   when these have come, with what they see here: one call in the place of two and a merge; on a GPU
                   as many of them as fill the rounds of work tiles of both calls

The first and the last are rectangles of the scores, so positions still count in them; the others are for masks alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.distributed.coverage import Coverage
from tilewise.distributed.schedule import Chunk, Work
from tilewise.distributed.shards import Shards

GRAIN = 128
"""Rows that stay are a multiple of this, so that they fill the tiles of a kernel."""
STAY = 0.75
"""Of the rows of a work, at least: what is late cannot hide what travels."""
MOST_ROUNDS = 32
"""Of work tiles; where there are more, it matters little how full the last one is."""


class Block(NamedTuple):
    """Works as one call: the queries and keys of some chunks.

    area: the pairs that the mask lets through, as in `Work`. travels: whether any of the queries came from another rank.
    groups: how many queries and keys see all of each other, group after group, where there are several.
    """

    q: tuple[Chunk, ...]
    k: tuple[Chunk, ...]
    area: int
    travels: bool
    groups: tuple[tuple[int, int], ...] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        """How many queries and keys."""
        return sum(chunk.tokens for chunk in self.q), sum(chunk.tokens for chunk in self.k)

    @classmethod
    def of(cls, work: Work) -> Block:
        return cls((work.q,), (work.k,), work.area, work.travels)


class Seen:
    """Which pairs of a rectangle the mask lets through."""

    def __init__(self, coverage: Coverage, shards: Shards) -> None:
        self.coverage, self.starts = coverage, shards.starts

    def _rows(self, q: Chunk, k: Chunk) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """From and to which key each row sees, by layer, within the rectangle."""
        start = int(self.starts[q.sequence])
        rows = slice(start + q.start, start + q.end)
        for first, past in self.coverage.layers:
            yield tuple(side[rows].clip(start + k.start, start + k.end) for side in (first, past))  # type: ignore[misc]

    def area(self, q: Chunk, k: Chunk) -> int:
        found = sum(int(np.maximum(past - first, 0).sum()) for first, past in self._rows(q, k))
        return found * self.coverage.repeat

    def visits(self, q: Chunk, k: Chunk) -> list[int]:
        """Tiles of GRAIN keys, from the first key on, that each GRAIN rows see."""
        start = int(self.starts[k.sequence]) + k.start
        places = np.arange(0, q.tokens, GRAIN)
        first, past = np.full(len(places), k.tokens), np.zeros(len(places), np.int64)
        for low, high in self._rows(q, k):
            low, high = np.where(low < high, low - start, k.tokens), np.where(low < high, high - start, 0)
            first, past = np.minimum(first, np.minimum.reduceat(low, places)), np.maximum(past, np.maximum.reduceat(high, places))
        return [max(n, 0) for n in (-(-past // GRAIN) - first // GRAIN).tolist()]

    def keys(self, q: Chunk, k: Chunk) -> Chunk | None:
        """From the first to the last key that any of the rows sees; None if they see nothing."""
        start = int(self.starts[q.sequence])
        ends = [(first[some].min(), past[some].max()) for first, past in self._rows(q, k) if (some := first < past).any()]
        if not ends:
            return None
        return Chunk(q.sequence, int(min(first for first, _ in ends)) - start, int(max(past for _, past in ends)) - start)


class Rounds(NamedTuple):
    """How long a call takes on a device that processes work tiles of GRAIN rows, the longest first.

    units: of the device. heads: of all batch entries together.
    """

    seen: Seen
    units: int
    heads: int

    def length(self, block: Block) -> int:
        """Of the unit with most to do, in tiles of GRAIN keys; a work tile costs about one beside those it visits."""
        visits = self.seen.visits(block.q[0], block.k[0])
        rounds = self.heads * len(visits) / self.units
        if rounds > MOST_ROUNDS:
            return round(self.heads * sum(visits) / self.units + rounds)
        done = [0] * min(self.units, self.heads * len(visits))
        for visited in sorted(visits, reverse=True):
            for _ in range(self.heads):
                heapq.heapreplace(done, done[0] + visited + 1)
        return max(done)


def joined_blocks(
    stages: Sequence[Sequence[Work]],
    seen: Seen,
    is_full: Callable[[Block], bool] | None,
    own: Block | None = None,
    small: int = 0,
    rounds: Rounds | None = None,
) -> list[list[Block]]:
    """The calls of each stage of a rank, the first of which has works of its own tokens.

    is_full: whether every row of a block sees every key; None where positions count, and rows must stay in order.
    own: all works of its own tokens together, where one call can compute these.
    small: up to so many pairs, blocks in which all is seen stand side by side in one call.
    rounds: by which it is chosen how many rows are late; None: as few as can be.
    """
    found = [_contiguous([Block.of(work) for work in works], seen) for works in stages]
    if own is None:
        _postpone(found, seen, rounds)
    else:
        found[0] = [own]
    if is_full is None:
        return found
    return [*found[:1], *(_side_by_side(_all_seen(blocks, is_full), is_full, small) for blocks in found[1:])]


def _contiguous(blocks: list[Block], seen: Seen) -> list[Block]:
    """Neighbours, by row and then by key, joined as long as there are any."""
    orders: tuple[Callable[[Block], tuple[Chunk, Chunk]], ...] = (lambda b: (b.q[0], b.k[0]), lambda b: (b.k[0], b.q[0]))
    count = len(blocks) + 1
    while len(blocks) < count:
        count = len(blocks)
        for order in orders:
            kept: list[Block] = []
            for block in sorted(blocks, key=order):
                both = _hull(kept[-1], block, seen) if kept else None
                kept[-1:] = [*kept[-1:], block] if both is None else [both]
            blocks = kept
    return sorted(blocks)


def _hull(a: Block, b: Block, seen: Seen) -> Block | None:
    """Two blocks as one rectangle, if that has the pairs of both and no others."""
    if a.travels != b.travels or not (_touch(a.q[0], b.q[0]) and _touch(a.k[0], b.k[0])):
        return None
    q, k = _span(a.q[0], b.q[0]), _span(a.k[0], b.k[0])
    return Block((q,), (k,), a.area + b.area, a.travels) if seen.area(q, k) == a.area + b.area else None


def _postpone(stages: list[list[Block]], seen: Seen, rounds: Rounds | None) -> None:
    """Rows of own works that later ones touch, joined to these."""
    for later in stages[1:]:
        for n, block in enumerate(later):
            for m, first in enumerate(stages[0]):
                both = _late(first, block, seen, rounds)
                if both is not None:
                    stages[0][m], later[n] = both
                    break


def _late(own: Block, block: Block, seen: Seen, rounds: Rounds | None) -> tuple[Block, Block] | None:
    """What is left of an own block, and the later block with the rows that were taken from it; None if that will not do.

    As few rows are late as the later block asks for, or more if that fills the rounds of work tiles better.
    """
    (rows,), (keys,) = own.q, own.k
    (q,), (k,) = block.q, block.k
    inside, beside = (k, q) if block.travels else (q, k)
    outer, wall = (keys, rows) if block.travels else (rows, keys)
    if not (_touch(beside, wall) and outer.sequence == inside.sequence and outer.start <= inside.start < inside.end <= outer.end):
        return None
    after = beside.start == wall.end if block.travels else inside.end == rows.end
    if not after and not (beside.end == wall.start if block.travels else inside.start == rows.start):
        return None
    grain = min(GRAIN, 1 << max(rows.tokens // 8, 1).bit_length() - 1)
    most = (rows.tokens - q.tokens) // grain * grain
    stays = [rest for rest in range(most, 0, -grain) if rest >= STAY * rows.tokens]
    found = (_parted(own, block, rest, after, seen) for rest in (stays if rounds else stays[:1]))
    pairs = [pair for pair in found if pair is not None]
    if not rounds or not pairs:
        return pairs[0] if pairs else None
    return min(pairs, key=lambda pair: sum(map(rounds.length, pair)))  # of equals the first, with most rows that stay


def _parted(own: Block, block: Block, rest: int, after: bool, seen: Seen) -> tuple[Block, Block] | None:
    """The same with so many rows that stay; `after`: the first ones."""
    (rows,), (keys,) = own.q, own.k
    (q,), (k,) = block.q, block.k
    cut = rows.start + rest if after else rows.end - rest
    stay, late = (Chunk(rows.sequence, *ends) for ends in ((rows.start, cut), (cut, rows.end)))
    if not after:
        stay, late = late, stay
    near, left = seen.keys(late, keys), seen.keys(stay, keys)
    if near is None or left is None or not _touch(near, k):
        return None
    both_q, both_k, area = _span(late, q), _span(near, k), seen.area(late, keys)
    if seen.area(both_q, both_k) != block.area + area:
        return None
    return Block((stay,), (left,), own.area - area, travels=False), Block((both_q,), (both_k,), block.area + area, block.travels)


def _all_seen(blocks: list[Block], is_full: Callable[[Block], bool]) -> list[Block]:
    """Blocks in which all is seen, by their keys: rows that have the same ones are one block."""
    whole = [block for block in blocks if is_full(block)]
    if len(whole) < 2:
        return blocks
    groups: dict[tuple[bool, tuple[Chunk, ...]], list[tuple[Chunk, int]]] = {}
    for travels in (False, True):
        mine = [block for block in whole if block.travels == travels]
        cuts = sorted({(block.q[0].sequence, end) for block in mine for end in block.q[0][1:]})
        for (sequence, start), (other, end) in pairwise(cuts):
            rows = Chunk(sequence, start, end)
            here = [block for block in mine if sequence == other and _within(rows, block.q[0])]
            if here:
                keys = _merged([block.k[0] for block in here])
                area = sum(block.area // block.q[0].tokens for block in here) * rows.tokens
                groups.setdefault((travels, keys), []).append((rows, area))
    found = [
        Block(_merged([rows for rows, _ in some]), keys, sum(area for _, area in some), travels)
        for (travels, keys), some in groups.items()
    ]
    if len(found) >= len(whole):
        return blocks
    return sorted([block for block in blocks if block not in whole] + found)


def _side_by_side(blocks: list[Block], is_full: Callable[[Block], bool], small: int) -> list[Block]:
    """Small blocks in which all is seen as groups of one, as far as no query is in two of them. Those that fill tiles come first,
    so that others begin where a tile does."""
    chosen: list[Block] = []
    for block in blocks:
        met = any(common(q, other.q) for other in chosen for q in block.q)
        if block.sizes[0] * block.sizes[1] <= small and not met and is_full(block):
            chosen.append(block)
    if len(chosen) < 2:
        return blocks
    chosen.sort(key=lambda block: [tokens % GRAIN > 0 for tokens in block.sizes])
    q = tuple(chunk for block in chosen for chunk in block.q)
    k = tuple(chunk for block in chosen for chunk in block.k)
    whole = Block(q, k, sum(b.area for b in chosen), any(b.travels for b in chosen), tuple(b.sizes for b in chosen))
    return sorted([block for block in blocks if block not in chosen] + [whole])


def common(own: Chunk, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """What a chunk has in common with any of others."""
    met = [chunk for chunk in chunks if chunk.sequence == own.sequence and chunk.start < own.end and own.start < chunk.end]
    return _merged([Chunk(own.sequence, max(own.start, chunk.start), min(own.end, chunk.end)) for chunk in met])


def _within(rows: Chunk, chunk: Chunk) -> bool:
    return rows.sequence == chunk.sequence and chunk.start <= rows.start and rows.end <= chunk.end


def _touch(a: Chunk, b: Chunk) -> bool:
    return a.sequence == b.sequence and a.start <= b.end and b.start <= a.end


def _span(a: Chunk, b: Chunk) -> Chunk:
    return Chunk(a.sequence, min(a.start, b.start), max(a.end, b.end))


def _merged(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Sorted, those that touch as one."""
    found: list[Chunk] = []
    for chunk in sorted(chunks):
        if found and _touch(found[-1], chunk):
            found[-1] = _span(found[-1], chunk)
        else:
            found.append(chunk)
    return tuple(found)
