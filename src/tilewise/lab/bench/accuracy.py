"""How accurate a result is beside float64: two figures for the output and two for each gradient, from all their elements.

The judge asks whether a result is right, and of a large case looks at some rows. Here one implementation's rounding is compared
with another's, and the largest error of a few rows would be chance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.lab.bench.cases import Case, Tensors
from tilewise.lab.bench.child import Outcome
from tilewise.lab.bench.judge import row_block, row_blocks
from tilewise.numerics.oracle import oracle, oracle_gradients


class Errors(NamedTuple):
    """Of one tensor; or their ratios to another contender's."""

    largest: float  # max |x - y|
    frobenius: float  # ‖x - y‖ / ‖y‖

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, which knows no infinity."""
        return {name: value if math.isfinite(value) else None for name, value in self._asdict().items()}

    def over(self, others: Errors) -> Errors:
        return Errors(*(_quotient(mine, other) for mine, other in zip(self, others, strict=True)))


def truth(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """Output and gradients in float64 as (B, H, S, D), a block of rows at a time."""
    problem = case.problem()
    inputs, dout = case.inputs(tensors), case.rank4(tensors.dout)
    sizes = {"out": dout, "dq": inputs.q, "dk": inputs.k, "dv": inputs.v} if case.trains else {"out": dout}
    found = {name: torch.zeros(x.shape, dtype=torch.float64, device=x.device) for name, x in sizes.items()}
    for start, stop in row_blocks(problem):
        part, given = row_block(problem, inputs, (start, stop))
        found["out"][:, :, start:stop] = oracle(part, given)[0]
        if case.trains:
            grads = oracle_gradients(part, given, dout[:, :, start:stop])
            found["dq"][:, :, start:stop] = grads.dq
            found["dk"] += grads.dk
            found["dv"] += grads.dv
    return found


def errors(case: Case, want: dict[str, Tensor], outcome: Outcome) -> dict[str, Errors]:
    """What an outcome lacks to the truth."""
    got = (outcome.out, *outcome.grads)
    return {name: _errors(case.rank4(x), y) for (name, y), x in zip(want.items(), got, strict=True)}


def _errors(got: Tensor, want: Tensor) -> Errors:
    if not got.numel():
        return Errors(0.0, 0.0)
    difference = (got.double() - want).nan_to_num(nan=math.inf, posinf=math.inf)
    lost = float(difference.norm())
    return Errors(float(difference.abs().max()), _quotient(lost, float(want.norm())) if lost else 0.0)


def _quotient(mine: float, other: float) -> float:
    """1 where both are nothing; never a NaN, which a maximum would overlook."""
    if not other:
        return math.inf if mine else 1.0
    return mine if mine == math.inf else mine / other
