"""From routes to stages: which moves and works come when."""

from __future__ import annotations

from itertools import starmap

import numpy as np

from tilewise.distributed.coverage import Parts
from tilewise.distributed.covers import Bools
from tilewise.distributed.intervals import Intervals, Ints, containing, joined
from tilewise.distributed.routes import Routes
from tilewise.distributed.schedule import Move, Stage, What, Work


def stage_of(source: Ints, target: Ints, ranks: int, remote: int) -> Ints:
    """The stage (1 … remote) in which a rank receives from another.

    In every stage all ranks receive from the same distances, so that all links are busy and none is asked by two at once.
    """
    distance = (source - target) % ranks
    return np.asarray(1 + (distance - 1) * remote // max(ranks - 1, 1))


def stages(found: Routes, remote: int = 1) -> tuple[Stage, ...]:
    """Own keys first, then what arrives, in `remote` stages; those without works are left out."""
    ranks = found.shards.ranks
    own, far = found.own, ~found.own
    by_key, by_query = far & ~found.by_query, far & found.by_query
    works: list[list[Work]] = [[] for _ in range(remote + 1)]
    piece = np.searchsorted(found.cuts, found.parts.q0, side="right") - 1
    moved, source = found.queries
    arrived = joined(moved.group * ranks + source, moved.first, moved.past)  # the queries of a pair of ranks, by target
    which = containing(arrived, (found.k_rank * ranks + found.q_rank)[by_query], found.parts.q0[by_query])
    which = which * len(found.cuts) + piece[by_query]
    for keep, block, into in ((own, piece[own], works[:1]), (by_key, piece[by_key], works), (by_query, which, works)):
        at = np.zeros(int(keep.sum()), np.int64)
        if keep is not own:
            sender = found.q_rank if keep is by_query else found.k_rank
            at = stage_of(sender[keep], found.rank[keep], ranks, remote)
        for number, work in _works(found, keep, block, at):
            into[number].append(work)
    moves, returns = _moves(found, remote)
    every = zip(works, moves, returns, strict=True)
    return tuple(
        Stage(tuple(sorted(w)), tuple(sorted(m)), tuple(sorted(r))) for i, (w, m, r) in enumerate(every) if w or not i
    )


def _works(found: Routes, keep: Bools, block: Ints, at: Ints) -> list[tuple[int, Work]]:
    """The works of some parts. Parts of one block of queries and one stage whose keys touch become one work."""
    parts = found.parts.where(keep)
    if not len(block):
        return []
    stages = int(at.max()) + 1
    rank, q_rank = found.rank[keep], found.q_rank[keep]
    group = block * stages + at
    whole = joined(group, parts.k0, parts.k1)
    member = containing(whole, group, parts.k0)
    q0, q1, area = _hulls(parts, member, len(whole.first))
    example = np.zeros(len(whole.first), np.int64)
    example[member] = np.arange(len(member))
    chunks = found.shards.chunks
    columns = (rank[example].tolist(), q_rank[example].tolist(), chunks(q0, q1), chunks(whole.first, whole.past), area)
    return list(zip((whole.group % stages).tolist(), starmap(Work, zip(*columns, strict=True)), strict=True))


def _hulls(parts: Parts, member: Ints, count: int) -> tuple[Ints, Ints, list[int]]:
    """From the first to the last row of the parts of each work, and their pairs."""
    q0, q1 = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(q0, member, parts.q0)
    np.maximum.at(q1, member, parts.q1)
    area = np.zeros(count, np.int64)
    np.add.at(area, member, parts.area)
    return q0, q1, area.tolist()


def _moves(found: Routes, remote: int) -> tuple[list[list[Move]], list[list[Move]]]:
    """The moves and the returns of each stage."""
    shards = found.shards
    moves: list[list[Move]] = [[] for _ in range(remote + 1)]
    returns: list[list[Move]] = [[] for _ in range(remote + 1)]
    kinds: tuple[tuple[What, tuple[Intervals, Ints]], ...] = (("kv", found.keys), ("q", found.queries))
    for what, (moved, source) in kinds:
        at = stage_of(source, moved.group, shards.ranks, remote)
        columns = (at.tolist(), source.tolist(), moved.group.tolist(), shards.chunks(moved.first, moved.past))
        for number, start, end, chunk in zip(*columns, strict=True):
            moves[number].append(Move(start, end, what, chunk))
            if what == "q":
                returns[number].append(Move(end, start, "out", chunk))
    return moves, returns
