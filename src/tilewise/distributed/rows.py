"""What the rows that must reach other ranks cost at least: the bound that plans keep to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tilewise.distributed.coverage import Coverage
from tilewise.distributed.intervals import containing, joined
from tilewise.distributed.schedule import RowBytes

if TYPE_CHECKING:
    from tilewise.distributed.routes import Routes

OF_ROWS = 1.05
"""Times the least bytes of their rows that even ranks may send; ranks are less even where that cannot be had otherwise."""


def least_of_rows(found: Routes, row: RowBytes, seen: Coverage) -> int:
    """Each row of keys that a rank's queries see and that it does not hold, once, by the cheaper route of its interval.

    found: routes of the shards by which keys alone travel. An interval is what touches of the keys that one rank sees, another
    one holds and a component has.
    """
    far, parts = ~found.own, found.parts.where(~found.own)
    pair = found.pair(found.k_rank, found.q_rank)[far]
    group = pair * len(seen.borders) + np.searchsorted(seen.borders, parts.k0, side="right")
    keys = joined(group, parts.k0, parts.k1)
    queries = joined(containing(keys, group, parts.k0), parts.q0, parts.q1)
    seeing = np.bincount(queries.group, queries.sizes, len(keys.group))
    by_key, by_query = row.route("kv"), row.route("q")
    return int((keys.sizes * np.where(seeing * by_query < keys.sizes * by_key, min(by_query, by_key), by_key)).sum())
