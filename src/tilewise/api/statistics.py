"""What a call with `stats=` gives back beside its output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilewise.backends.base import Statistics
from tilewise.problem import Problem


class Top(NamedTuple):
    """The largest weights of each row, falling, and the keys that have them; 0 and -1 where a row sees fewer keys."""

    weights: Tensor
    indices: Tensor


class Stats(NamedTuple):
    """The statistics of a call; None for those that were not asked for. See docs/statistics.md."""

    max_logit: Tensor | None = None
    entropy: Tensor | None = None
    key_mass: Tensor | None = None
    top: Top | None = None


def user_statistics(problem: Problem, found: Statistics) -> Stats:
    """As the user's arguments are laid out: of a packed batch, without the batch."""
    max_logit, entropy, _, key_mass, weights, indices = (
        x.squeeze(0) if problem.varlen and x is not None else x for x in found
    )
    top = None if weights is None or indices is None else Top(weights, indices)
    return Stats(max_logit, entropy, key_mass, top)
