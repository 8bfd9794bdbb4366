"""Calls of plain tensors, without transforms: F of `autograd.py`, the short way.

All of this is done at every step of a training. So the user's layout is undone inside the function: as a node of autograd's
graph, a view of q, k, v or the output costs more than what is left of a launch. Tensors of a packed batch stay as they are: a
backend that needs views makes them. Nor are absent tensors arguments, or a log-sum-exp that nobody asked for a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.backends.base import Backend, BackwardInputs, Inputs, Needs, from_rank4, rank4_inputs, to_rank4
from tilewise.ops.autograd import differentiable_gradients, gradients
from tilewise.ops.run import BACKWARD, backward, forward, profiled
from tilewise.ops.tensors import COUNT, DIFFERENTIABLE, any_batched, versioned, with_mask
from tilewise.problem import Problem

_transforms = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_grad_mode = torch.is_grad_enabled


class PlainCall(NamedTuple):
    """What calls with tensors of the same kind share."""

    problem: Problem
    backend: str
    chosen: Backend
    """Of the forward: it spares the dispatch."""
    layout: str
    """Of q, k, v and out: "bhsd", "bshd" or "packed"."""
    places: tuple[int, ...]
    """Of the tensors that are there, among the Inputs."""
    numbers: tuple[int, ...]
    """For each of Grads, the number of its input among the tensors; -1 for none."""

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, backend: str, chosen: Backend, layout: str = "bhsd") -> PlainCall:
        places = tuple(i for i, x in enumerate(inputs) if x is not None)
        numbers = tuple(places.index(i) if i in places else -1 for i in DIFFERENTIABLE)
        return cls(problem, backend, chosen, layout, places, numbers)

    def inputs(self, tensors: Sequence[Tensor], layout: str, quick: bool) -> Inputs:
        """Tensors at their places, q, k and v from the layout. Those of a mask may follow. `quick` as in `rank4`."""
        q, k, v = tensors[:3]
        if layout != "bhsd":
            q, k, v = rank4(q, layout, quick), rank4(k, layout, quick), rank4(v, layout, quick)
        if len(self.places) == 3:
            return Inputs(q, k, v)
        found: list[Any] = [q, k, v, *[None] * (COUNT - 3)]
        for i, x in zip(self.places[3:], tensors[3:], strict=False):
            found[i] = x
        return Inputs(*found)


def attend_plain(call: PlainCall, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """out, in the layout of q, k and v, and lse of rank 3 if it is asked for, with a gradient where one is wanted."""
    problem, layout = call.problem, call.layout
    if problem.needs_grad:
        tensors = inputs[:3] if len(call.places) == 3 else [inputs[i] for i in call.places]
        found = _apply(call, *tensors, *problem.program.tensors)
        return found if problem.needs_lse else (found, None)
    if layout != "bshd":
        return forward(problem, inputs, call.backend, call.chosen)
    q, k, v = rank4(inputs.q, layout, True), rank4(inputs.k, layout, True), rank4(inputs.v, layout, True)
    out, lse = forward(problem, Inputs(q, k, v, *inputs[3:]), call.backend, call.chosen)
    return in_layout(out, layout, True), lse


class PlainAttention(torch.autograd.Function):
    """out of a call's tensors and those of its mask, and lse if it is asked for: each result costs time."""

    @staticmethod
    def forward(ctx: Any, call: PlainCall, *tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        problem = call.problem
        inputs = call.inputs(tensors, _kept_layout(call.layout), True)
        out, lse = forward(problem, inputs, call.backend, call.chosen)
        if problem.device == "cuda" and "ahead" not in problem.memory:
            from tilewise.ops.ahead import compile_backward  # once for a problem

            whole = out if out.ndim == 4 else to_rank4(out)
            compile_backward(problem, rank4_inputs(inputs), (whole, lse), call.backend, needs_of(call, ctx.needs_input_grad))
        if call.layout == "bshd":
            out = out.transpose(1, 2)
        if out._is_view():
            out = out.data  # a view that is one of two results cannot be written to
        ctx.call = call
        ctx.save_for_backward(*tensors[:3], *map(versioned, tensors[3:]), out, lse)
        ctx.set_materialize_grads(False)
        return (out, lse) if problem.needs_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        call: PlainCall = ctx.call
        *tensors, out, lse = ctx.saved_tensors
        problem, backend, _, layout, places, numbers = call
        if len(tensors) > len(places):
            problem = with_mask(problem, tensors[len(places) :])
        # gradients are differentiated only with create_graph, which turns the gradient mode on
        short = not (_grad_mode() or _transforms() is not None or forward_ad._current_level >= 0)
        quick = short and not any_batched(dout, dlse)
        direct = quick and not _dispatch_modes()
        if direct:
            layout = _kept_layout(layout)
        inputs, needs = call.inputs(tensors, layout, short), needs_of(call, ctx.needs_input_grad)
        if layout != "bhsd":
            out, dout = rank4(out, layout, short), None if dout is None else rank4(dout, layout, quick)
        grads: Sequence[Tensor | None]
        if direct and dout is not None:
            grads = profiled(BACKWARD, backward, problem, inputs, BackwardInputs(out, lse, dout, dlse, needs), backend)
        elif short:
            grads = gradients(problem, backend, needs, dout, dlse, out, lse, inputs)
        elif dout is None and dlse is None:
            return (None,) * (1 + len(tensors))
        else:
            dout = torch.zeros_like(out) if dout is None else dout
            grads = differentiable_gradients(problem, backend, needs, dout, dlse, out, lse, inputs)
        if layout != "bhsd":
            grads = (*[None if x is None else in_layout(x, layout, quick) for x in grads[:3]], *grads[3:])
        if len(tensors) == 3:
            return (None, *grads[:3])
        placed: list[Tensor | None] = [None] * (1 + len(tensors))
        for i, grad, need in zip(numbers, grads, needs, strict=True):
            if need:
                placed[1 + i] = grad
        return tuple(placed)


_apply: Any = super(torch.autograd.Function, PlainAttention).apply
"""`PlainAttention.apply` without what it does for functorch: calls under its transforms take the long way."""


def needs_of(call: PlainCall, required: Sequence[bool]) -> Needs:
    """Which gradients are wanted, from what autograd says of a call and its tensors."""
    if len(call.places) == 3:
        return Needs(*required[1:4])
    return Needs(*[i >= 0 and required[1 + i] for i in call.numbers])


def _kept_layout(layout: str) -> str:
    """What is left to do where backends take packed tensors as they are."""
    return "bhsd" if layout == "packed" else layout


def rank4(x: Tensor, layout: str, quick: bool) -> Tensor:
    """A tensor in the user's layout as backends take it. `quick`: neither a graph nor a transform sees it."""
    if layout != "packed":
        return x if layout == "bhsd" else x.transpose(1, 2)
    return to_rank4(x) if quick else x.unsqueeze(0).transpose(1, 2)


def in_layout(x: Tensor, layout: str, quick: bool) -> Tensor:
    """The other way."""
    if layout != "packed":
        return x if layout == "bhsd" else x.transpose(1, 2)
    return from_rank4(x) if quick else x.squeeze(0).transpose(0, 1)
