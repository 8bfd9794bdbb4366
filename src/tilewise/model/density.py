"""The share of tiles a mask visits, fast enough for choosing a tile at call time.

Bands (causal, windows) are counted by arithmetic on the rows of tiles; for anything else the share is taken as 1, which
does not change which tile is best. The exact count is `masks.TileMap`'s, used wherever bytes are reported.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tilewise.masks.program import interval
from tilewise.problem import Problem


def bucket(length: int) -> int:
    """A length rounded up to an eighth of its octave, exact up to 256.

    Tiles are remembered by length. A cache that grows by one key a step would otherwise be planned anew at every step.
    """
    if length <= 256:
        return length
    step = 1 << (length.bit_length() - 4)
    return -(-length // step) * step


def band_of(problem: Problem) -> tuple[int, int] | None:
    """lo, hi of k - q for a mask that is one band, None for any other; lengths are those of a whole sequence."""
    kinds = problem.program.kinds
    if problem.varlen or len(kinds) != 1 or not kinds[0].is_band or kinds[0].is_offset:
        return None
    return interval(next(problem.program.terms()), problem.shape)[:2]


@lru_cache(maxsize=4096)
def visited_share(band: tuple[int, int] | None, rows: int, keys: int, m: int, n: int) -> tuple[float, float]:
    """Visited tiles over all tiles, on average and in the fullest row of tiles."""
    if band is None:
        return 1.0, 1.0
    lo, hi = band
    cols = -(-keys // n)
    starts = np.arange(0, rows, m, dtype=np.int64)
    ends = np.minimum(starts + m, rows)
    first = np.clip(starts + lo, 0, keys) // n
    last = np.clip(ends - 1 + hi, -1, keys - 1) // n  # -1 if no key is visible
    visited = np.maximum(last - first + 1, 0)
    return float(visited.mean() / cols), float(visited.max() / cols)
