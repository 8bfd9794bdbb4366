"""Rows that see no key give no gradient, whatever they hold and whatever comes back to them.

The kernels multiply such rows by weights of zero, so what is not finite in them has to go first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.problem import Problem

NEAR = 1e-5
"""A blind row's log-sum-exp is not further from the sink, relative to it or to 1: some roundings of fp32."""
Forward = Callable[[Problem, Inputs], tuple[Tensor, Tensor]]


class Rows(NamedTuple):
    """What a backward reads of each query row."""

    q: Tensor
    dout: Tensor
    dlse: Tensor | None


def without_blind(forward: Forward, problem: Problem, inputs: Inputs, lse: Tensor, rows: Rows) -> Rows:
    """`rows` with zeros where a row sees no key; `forward` is the backend's own."""
    blind = _blind(forward, problem, inputs, lse, rows)
    if blind is None or not blind.any():
        return rows
    q, dout = (x.masked_fill(blind.unsqueeze(-1), 0.0) for x in rows[:2])
    dlse = rows.dlse
    if dlse is not None and inputs.sinks is None:  # else a blind row's log-sum-exp is the sink, which wants the gradient
        dlse = dlse.masked_fill(blind, 0.0)
    return Rows(q, dout, dlse)


def _blind(forward: Forward, problem: Problem, inputs: Inputs, lse: Tensor, rows: Rows) -> Tensor | None:
    """Which rows see no key, (B, Hq, M); None where it does not matter."""
    if inputs.sinks is None:
        return None if lse.amin().item() > -math.inf else lse == -math.inf  # NaN hides the others
    # a sink hides them: their log-sum-exp is the sink's, and it matters only if zero times their values is not zero
    sinks = inputs.sinks.to(lse.dtype).unsqueeze(-1)
    if (lse - sinks > NEAR * (1 + sinks.abs())).all().item():
        return None
    if all(x.sum(dtype=lse.dtype).isfinite().item() for x in rows[:2]):
        return None
    return forward(problem, inputs._replace(sinks=None))[1] == -math.inf
