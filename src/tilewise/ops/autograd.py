"""Eager calls and torch.func: autograd functions for attention and its derivatives, and none where no gradient is wanted.

With F(x) = (out, lse), J(x, t) its JVP, B(x, d) its backward and H(x, d, t) the derivative of B along t, each function below has
the derivatives that docs/derivatives.md lists; what is listed as not served raises. They are applied the short way where a call
is plain, and by `apply`, which asks functorch, where a transform or a forward-mode level may be at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.backends.base import BackwardInputs, Inputs, Needs, Tangents
from tilewise.errors import DerivativeError
from tilewise.ops.run import BACKWARD, backward, forward, jvp, profiled
from tilewise.ops.second import apply_double_backward
from tilewise.ops.tensors import (
    COUNT,
    MOVING,
    added,
    any_batched,
    by_input,
    materialized_inputs,
    moving,
    moving_call,
    needs_of,
    present,
    primal,
    spread,
    tangents_of,
    versioned,
    watched,
    with_mask,
)
from tilewise.problem import Problem

_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def attend(problem: Problem, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """out and lse, with a gradient where one is wanted. For plain tensors `plain.attend_plain` does it in less time."""
    if problem.needs_grad:
        out, lse = _apply(problem, backend, *inputs, *problem.program.tensors)
        return out, lse
    return forward(problem, inputs, backend)


def attend_transformed(problem: Problem, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """The same under functorch's transforms and forward-mode levels.

    Where the tensors at hand have tangents, forward and JVP are one pass; not where a dual level meets autograd's graph, for a
    backward within that level needs the tangents of what is saved.
    """
    graph = _transforms() is None and problem.needs_grad
    problem = problem if problem.needs_grad else replace(problem, needs_grad=True)
    tangents = None if graph else tangents_of(inputs)
    if tangents is None:
        out, lse = apply_forward(problem, backend, *inputs, *problem.program.tensors)
        return out, lse
    primals = Inputs(*map(primal, inputs))  # type: ignore[arg-type]
    results = apply_jvp(problem, backend, *primals, *tangents, *problem.program.tensors)
    out, lse, out_t, lse_t = results
    return forward_ad.make_dual(out, out_t), forward_ad.make_dual(lse, lse_t)


class Attention(torch.autograd.Function):
    """F: out and lse of all inputs and the mask's tensors."""

    @staticmethod
    def forward(problem: Problem, backend: str, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return _forward(problem, tensors, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        problem, backend, *tensors = inputs
        ctx.problem, ctx.backend = problem, backend
        tensors = [*tensors[:3], *map(versioned, tensors[3:])]
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        required = ctx.needs_input_grad[2:]  # of the tensors, after problem and backend
        needs = needs_of(required)
        *tensors, out, lse = ctx.saved_tensors
        problem = with_mask(ctx.problem, tensors[COUNT:])
        grads: Sequence[Tensor | None] = (None,) * len(needs)
        if dout is not None or dlse is not None:
            dout = torch.zeros_like(out) if dout is None else dout
            inputs = Inputs(*tensors[:COUNT])
            grads = differentiable_gradients(problem, ctx.backend, needs, dout, dlse, out, lse, inputs)
        return (None, None, *by_input(grads, needs, len(required)))

    @staticmethod
    def jvp(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, _, _ = map(primal, ctx.saved_tensors)
        tangents = moving(args[2:])
        inputs, mask = tensors[:COUNT], tensors[COUNT:]
        _, _, out_t, lse_t = apply_jvp(ctx.problem, ctx.backend, *inputs, *tangents, *mask)
        return out_t, lse_t

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        from tilewise.ops import vmap  # calls without transforms need none

        problem, backend, *tensors = args
        roles = vmap.roles("inputs", "mask", mask=len(tensors) - COUNT)

        def call(problem: Problem, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
            return attend_transformed(with_mask(problem, tensors[COUNT:]), Inputs(*tensors[:COUNT]), backend)

        fold = vmap.Fold(problem, info.batch_size, roles, in_dims[2:], tensors)
        return fold.run(call, vmap.RESULTS)


_apply: Any = super(torch.autograd.Function, Attention).apply
"""`Attention.apply` without what it does for functorch: calls under its transforms take the long way."""


def _forward(problem: Problem, tensors: Sequence[Tensor | None], backend: str) -> tuple[Tensor, Tensor]:
    inputs, mask = Inputs(*tensors[:COUNT]), tensors[COUNT:]  # type: ignore[arg-type]
    problem = with_mask(problem, mask)  # type: ignore[arg-type]
    if watched(inputs, problem.program.tensors):
        from tilewise.ops import library

        return library.attend(problem, inputs, backend)
    return forward(problem, materialized_inputs(inputs), backend)


def gradients(
    problem: Problem,
    backend: str,
    needs: Needs,
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    inputs: Inputs,
) -> tuple[Tensor | None, ...]:
    """B on plain tensors; the upstream gradients may come in a batch."""
    if dout is None:
        if dlse is None:  # the graph of a gradient leads here too, and brings nothing back
            return (None,) * len(needs)
        dout = torch.zeros_like(out)
    given = BackwardInputs(out, lse, dout, dlse, needs)
    if any_batched(dout, dlse):
        from tilewise.ops import batched

        return batched.each(
            lambda dout, dlse: backward(problem, inputs, given._replace(dout=dout, dlse=dlse), backend), dout, dlse
        )
    if _dispatch_modes():
        from tilewise.ops import library

        return library.gradients(problem, inputs, given, backend)
    return tuple(profiled(BACKWARD, backward, problem, inputs, given, backend))


def differentiable_gradients(
    problem: Problem,
    backend: str,
    needs: Needs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    inputs: Inputs,
) -> tuple[Tensor | None, ...]:
    """B as a function that can be differentiated and transformed."""
    if not any(needs):
        return (None,) * len(needs)
    results = apply_backward(
        problem, backend, tuple(needs), dout, dlse, out, lse, *inputs, *problem.program.tensors
    )
    return spread(results, needs)


class AttentionBackward(torch.autograd.Function):
    """B: the gradients that are needed, as a function of the upstream gradients and the inputs.

    out and lse are functions of the inputs, so H knows what depends on them, and they have no gradient of their own.
    """

    @staticmethod
    def forward(problem: Problem, backend: str, needs: tuple[bool, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        dout, dlse, out, lse, *rest = tensors
        assert dout is not None and out is not None and lse is not None
        inputs, problem = Inputs(*rest[:COUNT]), with_mask(problem, rest[COUNT:])  # type: ignore[arg-type]
        given = (dout, dlse, out, lse, materialized_inputs(inputs))
        grads = gradients(problem, backend, Needs(*needs), *given)
        return present(grads, needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        problem, backend, needs = ctx.call
        dout, dlse, out, lse, *rest = ctx.saved_tensors
        inputs, mask = rest[:COUNT], rest[COUNT:]
        wanted = ctx.needs_input_grad[3:]  # dout, dlse, out, lse, the inputs, the mask
        tangents = spread(cotangents, needs)  # type: ignore[arg-type]
        nothing = (None,) * (3 + len(ctx.saved_tensors))
        if all(x is None for x in tangents):
            return nothing
        out_t = lse_t = None  # H finds what it needs of them, if nobody else wants them
        if wanted[0] or (wanted[1] and dlse is not None):
            _, _, out_t, lse_t = apply_jvp(problem, backend, *inputs, *tangents, *mask)
        second = needs_of(wanted[4:])
        grads: Sequence[Tensor | None] = (None,) * len(second)
        if any(second):
            given = (dout, dlse, out, lse, *inputs, *tangents, out_t, lse_t, *mask)
            grads = spread(apply_double_backward(problem, backend, tuple(second), *given), second)
        upstream = (out_t if wanted[0] else None, lse_t if wanted[1] and dlse is not None else None, None, None)
        return (None, None, None, *upstream, *by_input(grads, second, COUNT + len(mask)))

    @staticmethod
    def jvp(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        problem, backend, needs = ctx.call
        saved: list[Any] = [primal(x) for x in ctx.saved_tensors]
        dout, dlse, out, lse, *rest = saved
        inputs, mask = rest[:COUNT], rest[COUNT:]
        dout_t, dlse_t, out_t, lse_t, *moved = args[3:]
        tangents = moving(moved)
        parts = []
        if any(x is not None for x in tangents):
            if out_t is None or lse_t is None:
                _, _, out_t, lse_t = apply_jvp(problem, backend, *inputs, *tangents, *mask)
            given = (dout, dlse, out, lse, *inputs, *tangents, out_t, lse_t, *mask)
            parts.append(apply_double_backward(problem, backend, needs, *given))
        if dout_t is not None or dlse_t is not None:
            dout_t = torch.zeros_like(out) if dout_t is None else dout_t
            parts.append(apply_backward(problem, backend, needs, dout_t, dlse_t, out, lse, *inputs, *mask))
        return tuple(sum(each[1:], each[0]) for each in zip(*parts, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        from tilewise.ops import vmap  # calls without transforms need none

        problem, backend, needs, *tensors = args
        roles = vmap.roles("upstream", "results", "inputs", "mask", mask=len(tensors) - 4 - COUNT)
        fold = vmap.Fold(problem, info.batch_size, roles, in_dims[3:], tensors, needs)
        return fold.run(lambda problem, x: apply_backward(problem, backend, needs, *x), vmap.gradients(needs))


class AttentionJvp(torch.autograd.Function):
    """J with F: out, lse and their derivatives along the tangents."""

    @staticmethod
    def forward(problem: Problem, backend: str, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        inputs, tangents, problem = moving_call(problem, tensors)
        if any_batched(*tangents):
            from tilewise.ops import batched

            return batched.each(lambda *moving: jvp(problem, inputs, Tangents(*moving), backend), *tangents)  # type: ignore[return-value]
        if watched(inputs, problem.program.tensors):
            from tilewise.ops import library

            return library.derive(problem, inputs, tangents, backend)
        return tuple(jvp(problem, materialized_inputs(inputs), tangents, backend))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = inputs[:2]
        ctx.save_for_backward(*output, *inputs[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, dout_t: Any, dlse_t: Any) -> tuple[Any, ...]:
        out, lse, out_t, lse_t, *rest = ctx.saved_tensors
        wanted, mask = ctx.needs_input_grad[2:], rest[COUNT + MOVING :]
        inputs, tangents, problem = moving_call(ctx.call[0], rest)
        backend, needs, moving = ctx.call[1], needs_of(wanted[:COUNT]), wanted[COUNT : COUNT + MOVING]
        parts: list[Sequence[Tensor | None]] = []
        if any(needs) and (dout is not None or dlse is not None):
            first = torch.zeros_like(out) if dout is None else dout
            parts.append(differentiable_gradients(problem, backend, needs, first, dlse, out, lse, inputs))
        by_tangent: Sequence[Tensor | None] = (None,) * MOVING
        if dout_t is not None or dlse_t is not None:
            dout_t = torch.zeros_like(out_t) if dout_t is None else dout_t
            if any(moving):
                own = Needs(*moving)
                by_tangent = differentiable_gradients(problem, backend, own, dout_t, dlse_t, out, lse, inputs)
            if any(needs):
                given = (dout_t, dlse_t, out, lse, *inputs, *tangents, out_t, lse_t, *mask)
                second = apply_double_backward(problem, backend, tuple(needs), *given)
                parts.append(spread(second, needs))
        grads = [added(each) for each in zip(*parts, strict=True)] if parts else [None] * len(needs)
        return (None, None, *by_input(grads, needs, COUNT), *by_tangent, *(None for _ in mask))

    @staticmethod
    def jvp(ctx: Any, *args: Any) -> Any:
        raise DerivativeError(
            "attention has no forward-mode derivative of a forward-mode derivative; for second derivatives use "
            "torch.func.hessian, jacfwd(jacrev(f)) or jacrev(jacfwd(f))"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        from tilewise.ops import vmap  # calls without transforms need none

        problem, backend, *tensors = args
        roles = vmap.roles("inputs", "tangents", "mask", mask=len(tensors) - COUNT - MOVING)
        fold = vmap.Fold(problem, info.batch_size, roles, in_dims[2:], tensors)
        return fold.run(lambda problem, x: apply_jvp(problem, backend, *x), vmap.RESULTS * 2)


def _keep(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.call = inputs[:3]
    ctx.save_for_backward(*inputs[3:])
    ctx.save_for_forward(*inputs[3:])
    ctx.set_materialize_grads(False)



apply_forward: Any = Attention.apply
apply_backward: Any = AttentionBackward.apply
apply_jvp: Any = AttentionJvp.apply
