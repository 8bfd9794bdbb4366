"""What a rank's own tokens see of each other, where their order alone says it: all that came before them, or all of their group.

As under a window that is wider than the rank's chunks: those that it reaches across are one group, those that it does not are
several. One call computes that; the mask itself would ask how far tokens are apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilewise.distributed.coverage import Coverage
from tilewise.distributed.intervals import Ints
from tilewise.masks import MaskProgram


class Order(NamedTuple):
    """group: of each token, from 0 on. causal: whether a token sees those up to itself, or all of its group."""

    group: Ints
    causal: bool


def own_order(program: MaskProgram, seen: Coverage, tokens: Ints) -> Order | None:
    """The order of some tokens (their numbers on the axis, ascending); None where it does not say what they see."""
    if len(seen.layers) != 1 or not all(kind.is_band and not kind.is_offset for kind in program.kinds):
        return None  # what heads and batch entries see may differ
    first, past = (np.searchsorted(tokens, side[tokens]) for side in seen.layers[0])
    place = np.arange(len(tokens))
    if not (first <= place).all() or (first[first] != first).any() or (np.diff(first) < 0).any():
        return None
    group = np.cumsum(np.diff(first, prepend=0) > 0).astype(np.int64)
    for causal, ends in ((True, place + 1), (False, np.searchsorted(first, first, side="right"))):
        if (past == ends).all():
            return Order(group, causal)
    return None
