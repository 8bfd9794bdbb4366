"""Is a result right? Compared with the float64 oracle, elementwise, within the bounds that numerics derives.

Small cases are judged whole. Of large ones some query rows are recomputed, each over all its keys, in every head and
sequence; gradients are recomputed for one key head and its query heads, a block of rows at a time: O(N) memory. A case with
features (bias, dropout, documents …) is judged by all rows of one key head and its query heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.lab.bench.cases import Case, Tensors
from tilewise.lab.bench.child import Outcome
from tilewise.masks import Binding, Lowered, allowed, dense
from tilewise.numerics import bounds
from tilewise.numerics.oracle import oracle, oracle_gradients
from tilewise.problem import Problem

WHOLE = 2**22  # scores: up to here everything is recomputed
SAMPLES, SAMPLE_ROWS = 4, 16
BLOCK_SCORES = 2**23

Rows = tuple[int, int]
ALL = slice(None)


class Judgement(NamedTuple):
    """`error` is the largest difference from the oracle, `used` the largest share of its bound that an element used."""

    ok: bool
    error: float
    used: float
    checked: float  # share of the output rows that were recomputed

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which knows no infinity: None where the result is not even a number."""
        return {name: value if math.isfinite(value) else None for name, value in self._asdict().items()}


def compare(results: Iterable[tuple[Tensor, Tensor, Tensor]], checked: float) -> Judgement:
    """The worst of several comparisons, each of what was computed with what is right, and how far apart they may be."""
    largest = most = 0.0
    for got, want, bound in results:
        if got.numel():
            used = bounds.ratios(got, want, bound)
            error = torch.where(used == 0, 0.0, (got.double() - want).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
            largest, most = max(largest, float(error.max())), max(most, float(used.max()))
    return Judgement(most <= 1.0, largest, most, checked)


class Part(NamedTuple):
    """A part of the output (0) or of a gradient (1 to 3), what the oracle says of it, and how far off it may be."""

    tensor: int
    where: tuple[slice, ...]
    want: Tensor
    bound: Tensor


class Heads(NamedTuple):
    """One key head of one sequence and its query heads, as a problem of its own, and where they lie."""

    problem: Problem
    inputs: Inputs
    dout: Tensor
    queries: tuple[slice, ...]
    keys: tuple[slice, ...]


class Expected:
    """What a right result of a case is, computed once for all contenders."""

    def __init__(self, case: Case, tensors: Tensors) -> None:
        problem, inputs, dout = case.problem(), case.inputs(tensors), case.rank4(tensors.dout)
        chosen = Heads(problem, inputs, dout, (ALL,), (ALL,))
        if _scores(problem) > WHOLE:
            chosen = _one_head(chosen, first=bool(case.features))  # dropout counts heads and sequences from the first on
        self.case = case
        if case.features:
            self.parts = [Part(0, chosen.queries, *_output(chosen.problem, chosen.inputs))]
            self.checked = chosen.problem.heads / problem.heads
        else:
            samples = sample_rows(problem)
            blocks = [(rows, row_block(problem, inputs, rows)) for rows in samples]
            self.parts = [Part(0, (ALL, ALL, slice(*rows)), *_output(*block)) for rows, block in blocks]
            self.checked = sum(end - start for start, end in samples) / max(1, problem.seqlen_q)
        if case.trains:
            self.parts += _gradients(chosen, whole=bool(case.features))

    def judge(self, outcome: Outcome) -> Judgement:
        """Compare what a contender computed with the oracle on the same inputs."""
        got = [self.case.rank4(x) for x in (outcome.out, *outcome.grads)]
        problem = self.case.problem()
        batch = 1 if problem.varlen else problem.batch
        if tuple(got[0].shape) != (batch, problem.heads, problem.seqlen_q, problem.head_dim_v):
            return Judgement(False, torch.inf, torch.inf, 0.0)
        return compare(((got[tensor][where], want, bound) for tensor, where, want, bound in self.parts), self.checked)


def _output(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    return oracle(problem, inputs)[0], bounds.forward(problem, inputs).out


def _gradients(heads: Heads, whole: bool) -> list[Part]:
    """A block of rows at a time; `whole` at once, for features cannot be cut into blocks."""
    problem, inputs, dout, queries, keys = heads
    blocks, parts = [(0, problem.seqlen_q)] if whole else row_blocks(problem), []
    want_k, want_v, bound_k, bound_v = (
        torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (inputs.k, inputs.v) * 2
    )
    for rows in blocks:
        part, given = (problem, inputs) if whole else row_block(problem, inputs, rows)
        piece = dout[:, :, slice(*rows)]
        want, bound = oracle_gradients(part, given, piece), bounds.backward(part, given, piece)
        where = (*(*queries, ALL)[:2], slice(*rows))
        parts.append(Part(1, where, want.dq, bound.dq))
        want_k += want.dk
        want_v += want.dv
        bound_k += bound.dk
        bound_v += bound.dv
    # The bound of a sum of n terms grows like √n; each block was charged for its own rows only.
    growth = len(blocks) ** 0.5
    return [*parts, Part(2, keys, want_k, growth * bound_k), Part(3, keys, want_v, growth * bound_v)]


def _scores(problem: Problem) -> int:
    sequences = 1 if problem.varlen else problem.batch
    return sequences * problem.heads * problem.seqlen_q * problem.seqlen_k


def sample_rows(problem: Problem) -> list[Rows]:
    """Every row of a small problem; otherwise a few evenly spaced runs of rows, the first and the last among them."""
    m = problem.seqlen_q
    if m <= SAMPLES * SAMPLE_ROWS or _scores(problem) <= WHOLE:
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
        part = replace(part, mask=Lowered(dense(tile).lower(Binding(part.shape, asarray=lambda x: x))))
    return part, inputs._replace(q=inputs.q[:, :, slice(*rows)])


def _one_head(whole: Heads, first: bool) -> Heads:
    """The first key head of the first sequence with its query heads, or the last of the last. Sequences that differ (by lengths,
    or by a mask of tensors) stay together."""
    problem, inputs, dout = whole[:3]
    group = problem.group
    together = problem.varlen or bool(problem.program.tensors)
    sequence = ALL if together else slice(0, 1) if first else slice(-1, None)
    heads, kv_head = (slice(0, n) if first else slice(-n, None) for n in (group, 1))

    def cut(x: Tensor | None, *where: slice) -> Tensor | None:
        return None if x is None else x[tuple(ALL if side == 1 else at for side, at in zip(x.shape, where, strict=False))]

    bias = cut(inputs.bias, sequence, heads)
    batch, sides = problem.batch if together else 1, None if bias is None else tuple(bias.shape)
    alone = replace(problem, batch=batch, heads=group, kv_heads=1, bias=sides)  # type: ignore[arg-type]
    given = inputs._replace(
        q=inputs.q[sequence, heads],
        k=inputs.k[sequence, kv_head],
        v=inputs.v[sequence, kv_head],
        bias=bias,
        alibi=cut(inputs.alibi, sequence, heads),
        sinks=cut(inputs.sinks, heads),
    )
    return Heads(alone, given, dout[sequence, heads], (sequence, heads), (sequence, kv_head))
