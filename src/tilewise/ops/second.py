"""The derivative of attention's gradients as an autograd function, which has no derivatives itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Direction, Grads, Needs, Tangents
from tilewise.errors import DerivativeError
from tilewise.ops.run import double_backward
from tilewise.ops.tensors import COUNT, MOVING, any_batched, materialized_inputs, moving_call, present, watched
from tilewise.problem import Problem

_THIRD = (
    "attention has first and second derivatives, and no third ones; use backend-free code such as softmax(q @ k.mT) @ v"
)


class AttentionDoubleBackward(torch.autograd.Function):
    """H: the derivative of the gradients along a direction of the inputs."""

    @staticmethod
    def forward(problem: Problem, backend: str, needs: tuple[bool, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        dout, dlse, out, lse, *rest = tensors
        *moved, out_t, lse_t = rest[: COUNT + MOVING + 2]
        assert dout is not None and out is not None and lse is not None
        inputs, tangents, problem = moving_call(problem, (*moved, *rest[COUNT + MOVING + 2 :]))
        given = BackwardInputs(out, lse, dout, dlse, Needs(*needs))
        direction = Direction(tangents, out_t, lse_t)
        if any_batched(dout, dlse, *tangents):
            from tilewise.ops import batched

            def compute(dout: Tensor, dlse: Tensor | None, *moving: Tensor) -> Grads:
                along = Direction(Tangents(*moving[:MOVING]), *moving[MOVING:])
                return double_backward(problem, inputs, given._replace(dout=dout, dlse=dlse), along, backend)

            return present(batched.each(compute, dout, dlse, *tangents, out_t, lse_t), needs)
        if watched(inputs, problem.program.tensors):
            from tilewise.ops import library

            return present(library.derive_gradients(problem, inputs, given, direction, backend), needs)
        return present(double_backward(problem, materialized_inputs(inputs), given, direction, backend), needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise DerivativeError(_THIRD)

    @staticmethod
    def jvp(ctx: Any, *args: Any) -> Any:
        raise DerivativeError(_THIRD)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        from tilewise.ops import vmap  # calls without transforms need none

        problem, backend, needs, *tensors = args
        names = ("upstream", "results", "inputs", "tangents", "results", "mask")
        roles = vmap.roles(*names, mask=len(tensors) - 6 - COUNT - MOVING)
        fold = vmap.Fold(problem, info.batch_size, roles, in_dims[3:], tensors, needs)
        return fold.run(
            lambda problem, x: apply_double_backward(problem, backend, needs, *x), vmap.gradients(needs)
        )


apply_double_backward: Any = AttentionDoubleBackward.apply
