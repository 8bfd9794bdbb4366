"""Is a result right? Compared with the float64 oracle, elementwise, within the bounds that numerics derives.

Small cases are judged whole. Of large ones some query rows are recomputed, each over all its keys, in every head and
sequence; gradients are recomputed for one key head and its query heads, a block of rows at a time: O(N) memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.lab.bench.cases import Case, Tensors
from tilewise.masks import Lowered, MaskProgram, allowed
from tilewise.numerics import bounds
from tilewise.numerics.oracle import oracle, oracle_gradients
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.lab.bench.engine import Outcome

WHOLE = 2**22  # scores: up to here everything is recomputed
SAMPLES, SAMPLE_ROWS = 4, 16
BLOCK_SCORES = 2**23

Rows = tuple[int, int]


class Judgement(NamedTuple):
    """`error` is the largest difference from the oracle, `used` the largest share of its bound that an element used."""

    ok: bool
    error: float
    used: float
    checked: float  # share of the output rows that were recomputed

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which knows no infinity: None where the result is not even a number."""
        return {name: value if math.isfinite(value) else None for name, value in self._asdict().items()}


class Worst:
    """The worst of several comparisons."""

    def __init__(self) -> None:
        self.error = self.used = 0.0

    def see(self, got: Tensor, want: Tensor, bound: Tensor) -> None:
        if not got.numel():
            return
        used = bounds.ratios(got, want, bound)
        error = torch.where(used == 0, 0.0, (got.double() - want).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        self.error, self.used = max(self.error, float(error.max())), max(self.used, float(used.max()))

    def verdict(self, checked: float) -> Judgement:
        return Judgement(self.used <= 1.0, self.error, self.used, checked)


def judge(case: Case, tensors: Tensors, outcome: Outcome) -> Judgement:
    """Compare what a contender computed with the oracle on the same inputs."""
    problem = case.problem()
    q, k, v, dout = (rank4(case, x) for x in tensors)
    inputs, out, grads = Inputs(q, k, v), rank4(case, outcome.out), tuple(rank4(case, grad) for grad in outcome.grads)
    worst = Worst()
    if tuple(out.shape) != (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v):
        return Judgement(False, torch.inf, torch.inf, 0.0)
    samples = sample_rows(problem)
    for rows in samples:
        part, given = row_block(problem, inputs, rows)
        worst.see(out[:, :, slice(*rows)], oracle(part, given)[0], bounds.forward(part, given).out)
    if grads:
        _judge_gradients(problem, inputs, dout, grads, worst)
    return worst.verdict(sum(end - start for start, end in samples) / max(1, problem.seqlen_q))


def _judge_gradients(problem: Problem, inputs: Inputs, dout: Tensor, grads: tuple[Tensor, ...], worst: Worst) -> None:
    scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    if scores > WHOLE:
        problem, inputs, dout, grads = last_head(problem, inputs, dout, grads)
        scores = problem.heads * problem.seqlen_q * problem.seqlen_k
    got_q, got_k, got_v = grads
    blocks = row_blocks(problem)
    want_k, want_v, bound_k, bound_v = (
        torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (got_k, got_v) * 2
    )
    for rows in blocks:
        part, given = row_block(problem, inputs, rows)
        piece = dout[:, :, slice(*rows)]
        want, bound = oracle_gradients(part, given, piece), bounds.backward(part, given, piece)
        worst.see(got_q[:, :, slice(*rows)], want.dq, bound.dq)
        want_k += want.dk
        want_v += want.dv
        bound_k += bound.dk
        bound_v += bound.dv
    # The bound of a sum of n terms grows like √n; each block was charged for its own rows only.
    growth = len(blocks) ** 0.5
    worst.see(got_k, want_k, growth * bound_k)
    worst.see(got_v, want_v, growth * bound_v)


def sample_rows(problem: Problem) -> list[Rows]:
    """Every row of a small problem; otherwise a few evenly spaced runs of rows, the first and the last among them."""
    m = problem.seqlen_q
    if m <= SAMPLES * SAMPLE_ROWS or problem.batch * problem.heads * m * problem.seqlen_k <= WHOLE:
        return [(0, m)]
    last = m - SAMPLE_ROWS
    starts = [round(i * last / (SAMPLES - 1)) for i in range(SAMPLES)]
    return [(start, start + SAMPLE_ROWS) for start in starts]


def row_blocks(problem: Problem) -> list[Rows]:
    """The rows, cut so that the scores of a block stay within BLOCK_SCORES."""
    step = max(1, BLOCK_SCORES // max(1, problem.batch * problem.heads * problem.seqlen_k))
    return [(start, min(start + step, problem.seqlen_q)) for start in range(0, problem.seqlen_q, step)]


def row_block(problem: Problem, inputs: Inputs, rows: Rows) -> tuple[Problem, Inputs]:
    """Some query rows as a problem of their own, with their rows of the mask."""
    arange = partial(torch.arange, device=inputs.q.device)
    tile = allowed(problem.program, problem.shape, rows, (0, problem.seqlen_k), arange)
    part = replace(problem, seqlen_q=rows[1] - rows[0])
    if tile is not None:
        part = replace(part, mask=Lowered(MaskProgram("e", (), (tile,))))
    return part, inputs._replace(q=inputs.q[:, :, slice(*rows)])


def last_head(
    problem: Problem, inputs: Inputs, dout: Tensor, grads: tuple[Tensor, ...]
) -> tuple[Problem, Inputs, Tensor, tuple[Tensor, ...]]:
    """The last key head of the last sequence with its query heads; bench masks are the same for all of them."""

    def last(x: Tensor) -> Tensor:
        return x[-1:, -problem.group :] if x.shape[1] == problem.heads else x[-1:, -1:]

    alone = replace(problem, batch=1, heads=problem.group, kv_heads=1)
    given = Inputs(last(inputs.q), last(inputs.k), last(inputs.v))
    return alone, given, last(dout), tuple(last(grad) for grad in grads)


def rank4(case: Case, x: Tensor) -> Tensor:
    """A tensor of the case's layout as (B, H, S, D), without its history."""
    return x.detach().transpose(1, 2) if case.layout == "bshd" else x.detach()
