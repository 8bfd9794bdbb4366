"""Single queries in invariant calls: the query heads of a group become rows of their key head.

The forward's lanes lie along rows, and a strip has those of one head: of a single query it would use one lane. What a lane
computes depends on no other, so a row keeps its bits wherever it stands.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.masks.algebra import Full
from tilewise.masks.program import UNBOUNDED
from tilewise.problem import Problem

MEMORY = "cpu heads as rows"
REASON = "the query heads of a group are rows of their key head here: of single queries, a strip holds all of them"


def as_rows(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs] | None:
    """The call with the heads of a group as rows, if each of its sequences has at most one query and nothing tells one head from
    another; None elsewhere."""
    if MEMORY not in problem.memory:
        problem.memory[MEMORY] = _problem(problem)
    known: Problem | None = problem.memory[MEMORY]
    if known is None or inputs.cu_q is None or not (problem.rows == 1 or bool((inputs.cu_q.diff() <= 1).all())):
        return None
    group, (_, heads, tokens, dim) = problem.group, inputs.q.shape
    q = inputs.q.reshape(heads // group, group, tokens, dim).transpose(1, 2).reshape(1, heads // group, tokens * group, dim)
    return known, inputs._replace(q=q, cu_q=inputs.cu_q * group)


def as_heads(problem: Problem, x: Tensor) -> Tensor:
    """Rows of a result, (1, Hk, T · group, …), back as the heads that they were of `problem`: (1, Hq, T, …)."""
    _, heads, rows, *rest = x.shape
    group = problem.group
    return x.reshape(heads, rows // group, group, *rest).transpose(1, 2).reshape(1, heads * group, rows // group, *rest)


def _problem(problem: Problem) -> Problem | None:
    given = problem.sinks or problem.alibi or problem.bias is not None or problem.dropout_p or problem.stats or problem.tile
    if not problem.invariant or problem.group == 1 or given or not _sees_all(problem):
        return None
    group, rows = problem.group, problem.rows
    return replace(problem, heads=problem.kv_heads, seqlen_q=problem.seqlen_q * group, rows=rows * group, mask=Full())


def _sees_all(problem: Problem) -> bool:
    """Does the last row of every sequence see all of its keys?"""
    kinds, ints = problem.program.kinds, problem.program.ints
    if not kinds:
        return not problem.program.structure
    return len(kinds) == 1 and kinds[0].is_bottom_right and ints[0] <= -UNBOUNDED and ints[1] >= 0
