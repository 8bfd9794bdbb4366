"""Eager calls: one autograd.Function, and not even that when no gradient is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.backends.base import Backend, Inputs, Needs
from tilewise.ops.run import backward, forward
from tilewise.problem import Problem


def attend(problem: Problem, inputs: Inputs, backend: str, chosen: Backend | None = None) -> tuple[Tensor, Tensor]:
    """out and lse, with a gradient where one is wanted. `chosen` spares the dispatch if the caller knows its result."""
    if problem.needs_grad:
        out, lse = Attention.apply(problem, backend, chosen, *inputs)
        return out, lse
    return forward(problem, inputs, chosen or backend)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, backend: str, chosen: Backend | None, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        out, lse = forward(problem, inputs, chosen or backend)
        ctx.problem, ctx.backend = problem, backend
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        inputs = Inputs(*tensors)
        # after problem, backend, chosen come q, k, v, bias, alibi, sinks, seed, cu_q, cu_k
        wanted = ctx.needs_input_grad[3:]
        needs = Needs(*wanted[:4], dsinks=wanted[5])
        if dout is None:
            dout = torch.zeros_like(out)
        grads = backward(ctx.problem, inputs, out, lse, dout, dlse, needs, ctx.backend)
        return None, None, None, *grads[:4], None, grads.dsinks, None, None, None
