"""Calls with statistics: out, lse and what the rows saw, by a function of their own.

The entropy is differentiable, once; all other statistics are not. With a sink, what comes back to the entropy takes a pass of
its own, since the entropy knows nothing of the sink.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.backends.base import (
    Backend,
    BackwardInputs,
    EntropyCotangent,
    Grads,
    Inputs,
    Needs,
    Statistics,
    empty_statistics,
)
from tilewise.errors import ArgumentError, DerivativeError, KernelError
from tilewise.numerics.merge import finite
from tilewise.ops.packing import check_packing
from tilewise.ops.run import backward, empty_forward, is_empty, own_precision
from tilewise.ops.tensors import by_input, materialized, needs_of
from tilewise.problem import Problem

_DIFFERENTIABLE = Statistics._fields.index("entropy")
ONCE = "a call with stats= has first derivatives only; for second ones call attention without stats="


def refuse() -> None:
    """Raise: statistics have no rules for transforms."""
    raise ArgumentError(
        "stats: statistics have no rules for torch.func's transforms and forward-mode derivatives; call attention with stats= "
        "outside of them"
    )


def attend(problem: Problem, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor, Statistics]:
    """out, lse and the statistics that the problem names."""
    if not problem.needs_grad:
        return forward(problem, inputs, backend)
    if not is_empty(problem) and backend != "auto":  # a backend asked for by name does the gradients too
        dispatch.select(problem, inputs, backend, backward=True)
    apply: Any = AttentionStatistics.apply
    out, lse, *stats = apply(problem, backend, *inputs)
    return out, lse, Statistics(*stats)


def forward(problem: Problem, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor, Statistics]:
    if problem.varlen:
        check_packing(problem, inputs)
    if is_empty(problem):
        out, lse = empty_forward(problem, inputs)
        return out, lse, empty_statistics(problem, lse)
    chosen: Backend | None = problem.memory.get(("statistics", backend))  # calls alike share a problem
    if chosen is None:
        chosen = problem.memory["statistics", backend] = dispatch.select(problem, inputs, backend).backend
    with own_precision(problem.device):
        while True:
            try:
                return chosen.statistics(problem, inputs)
            except KernelError as error:
                chosen = problem.memory["statistics", backend] = dispatch.next_backend(chosen, error, problem, inputs, backend)


class AttentionStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, backend: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, stats = forward(problem, Inputs(*tensors), backend)  # type: ignore[arg-type]
        ctx.problem, ctx.backend, ctx.mask = problem, backend, problem.program.tensors
        saved = (*tensors, out, lse, stats.entropy, stats.key_lse, *ctx.mask)
        ctx.save_for_backward(*(x.clone() if x is not None and x.is_inference() else x for x in saved))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for i, x in enumerate(stats) if x is not None and i != _DIFFERENTIABLE))
        return (out, lse, *stats)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*grads, *ctx.saved_tensors)):
            raise DerivativeError(ONCE)
        count = len(Inputs._fields)
        dout, dlse, dentropy = grads[0], grads[1], grads[2 + _DIFFERENTIABLE]
        out, lse, entropy, key_lse = ctx.saved_tensors[count : count + 4]
        inputs, needs = Inputs(*ctx.saved_tensors[:count]), needs_of(ctx.needs_input_grad[2:])
        dout = torch.zeros_like(out) if dout is None else dout
        given = BackwardInputs(out, lse, dout, dlse, needs)
        found = all_gradients(ctx.problem, inputs, given, (dentropy, entropy, key_lse), ctx.backend)
        return (None, None, *by_input(found, needs, count))


def all_gradients(
    problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: tuple[Tensor | None, Tensor, Tensor], backend: str
) -> Grads:
    """The gradients of a call; `entropy` is what comes back to it (None: nothing), itself, and the log-sum-exp of keys alone."""
    dentropy, value, key_lse = entropy
    if dentropy is None:
        return backward(replace(problem, stats=()), inputs, given, backend)
    blind = key_lse == float("-inf")
    cotangent = EntropyCotangent(materialized(dentropy).masked_fill(blind, 0.0), finite(key_lse) - value)
    return gradients(problem, inputs, given, (cotangent, key_lse), backend)


def gradients(
    problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: tuple[EntropyCotangent, Tensor], backend: str
) -> Grads:
    """All gradients; `entropy` is what comes back to it and the log-sum-exp without the sink."""
    cotangent, key_lse = entropy
    if inputs.sinks is None:
        return _entropy_backward(problem, inputs, given, cotangent, backend)
    through_out = backward(replace(problem, stats=()), inputs, given, backend)
    zero = torch.zeros_like(given.out)
    needs = Needs(given.needs.dq, given.needs.dk, False, given.needs.dbias, False)
    alone = BackwardInputs(zero, key_lse, zero, None, needs)
    through_entropy = _entropy_backward(
        replace(problem, sinks=False), inputs._replace(sinks=None), alone, cotangent, backend
    )
    pairs = zip(through_out, through_entropy, strict=True)
    return Grads(*(x if y is None or x is None else x + y for x, y in pairs))


def _entropy_backward(
    problem: Problem, inputs: Inputs, given: BackwardInputs, cotangent: EntropyCotangent, backend: str
) -> Grads:
    if is_empty(problem):
        return backward(replace(problem, stats=()), inputs, given, backend)
    dlse = None if given.dlse is None else materialized(given.dlse)
    given = given._replace(dout=materialized(given.dout), dlse=dlse)
    chosen: Backend = dispatch.select(problem, inputs, backend, backward=True).backend
    with own_precision(problem.device):
        while True:
            try:
                return chosen.entropy_backward(problem, inputs, given, cotangent)
            except KernelError as error:
                chosen = dispatch.next_backend(chosen, error, problem, inputs, backend, backward=True)
