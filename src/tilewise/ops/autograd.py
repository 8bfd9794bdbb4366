"""Eager calls: one autograd.Function, and not even that when no gradient is wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Backend, BackwardInputs, Inputs, Needs
from tilewise.errors import DerivativeError
from tilewise.masks import Lowered, MaskProgram
from tilewise.ops.run import BACKWARD, backward, forward, profiled
from tilewise.ops.tensors import by_input, needs_of
from tilewise.problem import Problem

_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_batched = torch._C._functorch.is_legacy_batchedtensor  # what `is_grads_batched` passes; `torch.func.vmap` has its stack


def attend(problem: Problem, inputs: Inputs, backend: str, chosen: Backend | None = None) -> tuple[Tensor, Tensor]:
    """out and lse, with a gradient where one is wanted. `chosen` spares the dispatch if the caller knows its result."""
    if problem.needs_grad:
        plain = inputs.bias is inputs.alibi is inputs.sinks is inputs.seed is inputs.cu_q is None
        tensors = inputs[:3] if plain else inputs  # each argument costs, present or not
        out, lse = _apply(problem, backend, chosen, *tensors)
        return out, lse
    return forward(problem, inputs, backend, chosen)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, problem: Problem, backend: str, chosen: Backend | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(problem, Inputs(*tensors), backend, chosen)  # type: ignore[arg-type]
        ctx.problem, ctx.backend = problem, backend
        mask = problem.program.tensors
        if mask or len(tensors) > 3:
            ctx.save_for_backward(*tensors[:3], *map(_versioned, tensors[3:]), out, lse, *map(_versioned, mask))
        else:
            ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        required = ctx.needs_input_grad[3:]  # of the inputs, after problem, backend and chosen
        needs = needs_of(required)
        saved, own = ctx.saved_tensors, len(required) + 2  # inputs, out and lse; then the mask's
        problem = _with_mask(ctx.problem, saved[own:]) if len(saved) > own else ctx.problem
        # gradients are differentiated only with create_graph, which turns the gradient mode on
        differentiate: Any = AttentionBackward.apply if torch.is_grad_enabled() else gradients
        grads = differentiate(problem, ctx.backend, needs, dout, dlse, *saved[:own])
        return (None, None, None, *by_input(grads, needs, len(required)))


def _versioned(x: Tensor | None) -> Tensor | None:
    """As autograd can save it, to see changes in place: an inference tensor counts none, so it is copied."""
    return x.clone() if x is not None and x.is_inference() else x


def _with_mask(problem: Problem, tensors: tuple[Tensor, ...]) -> Problem:
    """The problem with the mask's tensors as they were saved, which hooks may have moved."""
    program = problem.program
    if all(a is b for a, b in zip(program.tensors, tensors, strict=True)):
        return problem
    return replace(problem, mask=Lowered(MaskProgram(program.structure, program.ints, tensors)))


_apply: Any = super(torch.autograd.Function, Attention).apply
"""`Attention.apply` without what it does for functorch: calls under its transforms go through the operator."""


def gradients(
    problem: Problem, backend: str, needs: Needs, dout: Tensor | None, dlse: Tensor | None, *saved: Tensor
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = saved
    if dout is None:
        dout = torch.zeros_like(out)
    inputs, given = Inputs(*tensors), BackwardInputs(out, lse, dout, dlse, needs)
    if _transforms() is not None or _batched(dout) or (dlse is not None and _batched(dlse)):
        from tilewise.ops import batched

        return batched.gradients(
            lambda dout, dlse: backward(problem, inputs, given._replace(dout=dout, dlse=dlse), backend), dout, dlse
        )
    if _dispatch_modes():
        from tilewise.ops import library

        return library.gradients(problem, inputs, given, backend)
    return tuple(profiled(BACKWARD, backward, problem, inputs, given, backend))


class AttentionBackward(torch.autograd.Function):
    """A function of its own, so that a second derivative is refused and never silently taken for zero."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, backend: str, needs: Needs, dout: Tensor | None, dlse: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor | None, ...]:
        return gradients(problem, backend, needs, dout, dlse, *saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        raise DerivativeError(
            "attention has first derivatives only; for a second one use backend-free code such as softmax(q @ k.mT) @ v"
        )
