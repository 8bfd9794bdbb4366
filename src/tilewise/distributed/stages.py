"""From shards and what queries see to stages: works and moves."""

from __future__ import annotations

from itertools import starmap

import numpy as np

from tilewise.distributed.coverage import Coverage
from tilewise.distributed.intervals import Intervals, joined, pieces
from tilewise.distributed.schedule import Move, Stage, Work
from tilewise.distributed.shards import Shards


def stages(shards: Shards, seen: Coverage) -> tuple[Stage, ...]:
    """Own keys first, then all others at once."""
    piece = np.repeat(np.arange(len(shards.rank)), np.diff(shards.bounds))
    parts, _, owner = pieces(seen.seen(piece), shards.bounds)
    own = shards.rank[parts.group] == shards.rank[owner]
    local = Stage(works=_works(shards, seen, joined(*parts.where(own))))
    far = parts.where(~own)
    if not len(far.first):
        return (local,)
    wanted, _, holder = pieces(joined(shards.rank[far.group], far.first, far.past), shards.bounds)
    chunks = shards.chunks(wanted.first, wanted.past)
    ends = zip(shards.rank[holder].tolist(), wanted.group.tolist(), chunks, strict=True)
    moves = sorted(Move(source, target, "kv", chunk) for source, target, chunk in ends)
    return local, Stage(works=_works(shards, seen, joined(*far)), moves=tuple(moves))


def _works(shards: Shards, seen: Coverage, keys: Intervals) -> tuple[Work, ...]:
    """The works of pieces of queries (the groups) over key intervals, each with those queries only that see some of the keys."""
    parts, _, _ = pieces(keys, shards.starts)
    rows: list[tuple[int, int, int]] = []
    for number, k0, k1 in zip(*(column.tolist() for column in parts), strict=True):
        start, end = int(shards.bounds[number]), int(shards.bounds[number + 1])
        count = seen.counts(slice(start, end), (k0, k1))
        some = np.flatnonzero(count)
        rows.append((start + int(some[0]), start + int(some[-1]) + 1, int(count.sum())))
    first, past, area = np.array(rows, np.int64).reshape(-1, 3).T
    rank = shards.rank[parts.group].tolist()
    columns = (rank, rank, shards.chunks(first, past), shards.chunks(parts.first, parts.past), area.tolist())
    return tuple(sorted(starmap(Work, zip(*columns, strict=True))))
