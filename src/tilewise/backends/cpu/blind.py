"""Rows that see no key give no gradient, whatever they hold and whatever comes back to them.

The kernels multiply such rows by weights of zero, so what is not finite in them has to go first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from tilewise.backends.base import BackwardInputs, Inputs
from tilewise.problem import Problem

NEAR = 1e-5
"""A blind row's log-sum-exp is not further from the sink, relative to it or to 1: some roundings of fp32."""
Forward = Callable[[Problem, Inputs], tuple[Tensor, Tensor]]


def without_blind(
    forward: Forward, problem: Problem, inputs: Inputs, given: BackwardInputs
) -> tuple[Inputs, BackwardInputs, Tensor | None]:
    """q, dout and dlse with zeros where a row sees no key, and which rows these are; `forward` is the backend's own."""
    blind = _blind(forward, problem, inputs, given)
    if blind is None or not blind.any():
        return inputs, given, None
    q, dout = (x.masked_fill(blind.unsqueeze(-1), 0.0) for x in (inputs.q, given.dout))
    dlse = given.dlse
    if dlse is not None and inputs.sinks is None:  # else a blind row's log-sum-exp is the sink, which wants the gradient
        dlse = dlse.masked_fill(blind, 0.0)
    return inputs._replace(q=q), given._replace(dout=dout, dlse=dlse), blind


def _blind(forward: Forward, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Tensor | None:
    """Which rows see no key, (B, Hq, M); None where it does not matter."""
    lse = given.lse
    if inputs.sinks is None:
        return None if lse.amin().item() > -math.inf else lse == -math.inf  # NaN hides the others
    # a sink hides them: their log-sum-exp is the sink's, and it matters only if zero times their values is not zero
    sinks = inputs.sinks.to(lse.dtype).unsqueeze(-1)
    if (lse - sinks > NEAR * (1 + sinks.abs())).all().item():
        return None
    if all(x.sum(dtype=lse.dtype).isfinite().item() for x in (inputs.q, given.dout)):
        return None
    return forward(problem, inputs._replace(sinks=None))[1] == -math.inf
