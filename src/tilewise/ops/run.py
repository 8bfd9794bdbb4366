"""The two functions under every mode: choose a backend, run it, and answer what needs no backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from tilewise import dispatch
from tilewise.backends.base import (
    Backend,
    BackwardInputs,
    Direction,
    Grads,
    Inputs,
    Jvp,
    Tangents,
    empty_lse,
    empty_out,
    rank4_inputs,
    sink_gradient,
)
from tilewise.errors import KernelError
from tilewise.ops.packing import check_packing
from tilewise.ops.tensors import materialized
from tilewise.problem import Problem

Result = TypeVar("Result")
FORWARD, BACKWARD = "tilewise::attention", "tilewise::attention_backward"
"""The names of the operators, as of the ranges that torch.profiler gets around calls that run no operator."""
_AS_IT_IS = nullcontext()
any_autocast = torch._C._is_any_autocast_enabled
"""Asking for one device's autocast costs more than all the other questions to a call together."""


def profiled(name: str, call: Callable[..., Result], *args: object) -> Result:
    """`call(*args)`, as a range of that name if a profiler runs; without one it costs a look at a flag."""
    if not profiler._is_profiler_enabled:
        return call(*args)
    with profiler.record_function(name):
        return call(*args)


def is_empty(problem: Problem) -> bool:
    """Whether there is nothing to attend to, or nobody to attend."""
    return 0 in (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)


def forward(
    problem: Problem, inputs: Inputs, backend: str = "auto", chosen: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of a problem. `chosen` spares the dispatch; backends never see an empty problem, so who passes one knows
    that it is not. Then q, k and v of a packed batch may be (T, H, D), and so is out."""
    if problem.varlen:
        check_packing(problem, inputs)
    if chosen is None:
        if is_empty(problem):
            return empty_forward(problem, inputs)
        chosen = dispatch.select(problem, inputs, backend).backend
    with own_precision(problem.device):
        while True:
            try:
                return chosen.forward(problem, inputs) if inputs.q.ndim == 4 else chosen.forward_packed(problem, inputs)
            except KernelError as error:
                chosen = dispatch.next_backend(chosen, error, problem, rank4_inputs(inputs), backend)


def backward(problem: Problem, inputs: Inputs, given: BackwardInputs, backend: str = "auto") -> Grads:
    """The gradients of a problem; the backend is chosen anew, since forward and backward have different strengths.

    q, k, v, out, dout and their gradients may be (T, H, D) as in `forward`."""
    dout, dlse = materialized(given.dout), None if given.dlse is None else materialized(given.dlse)
    if dout is not given.dout or dlse is not given.dlse:
        given = given._replace(dout=dout, dlse=dlse)
    key = ("backward", dispatch.registry_key(backend))  # training meets the problem again at every step
    chosen: Backend | None = problem.memory.get(key)
    if chosen is None:
        if is_empty(problem):
            return empty_backward(inputs, given)
        chosen = problem.memory[key] = dispatch.select(problem, rank4_inputs(inputs), backend, backward=True).backend
    with own_precision(problem.device):
        while True:
            try:
                run = chosen.backward if inputs.q.ndim == 4 else chosen.backward_packed
                return run(problem, inputs, given)
            except KernelError as error:
                chosen = dispatch.next_backend(chosen, error, problem, rank4_inputs(inputs), backend, backward=True)
                problem.memory[key] = chosen


def jvp(problem: Problem, inputs: Inputs, tangents: Tangents, backend: str = "auto") -> Jvp:
    """The forward and its derivative along tangents of the inputs."""
    tangents = Tangents(*(None if x is None else materialized(x) for x in tangents))
    if is_empty(problem) or all(x is None for x in tangents):
        out, lse = forward(problem, inputs, backend)
        out_t, lse_t = torch.zeros_like(out), torch.zeros_like(lse)
        if inputs.sinks is not None and tangents.sinks is not None:  # a row without keys has the sink's log-sum-exp
            lse_t += torch.where(inputs.sinks.isinf(), 0.0, tangents.sinks.to(lse.dtype))[:, None]
        return Jvp(out, lse, out_t, lse_t)
    if problem.varlen:
        check_packing(problem, inputs)
    return _derive("jvp", problem, inputs, backend, lambda chosen: chosen.jvp(problem, inputs, tangents))


def double_backward(
    problem: Problem, inputs: Inputs, given: BackwardInputs, direction: Direction, backend: str = "auto"
) -> Grads:
    """The derivative of the gradients along a direction of the inputs, while the upstream gradients stay."""
    if is_empty(problem):  # the log-sum-exp of every row is the sink, or nothing: gradients do not depend on the inputs
        return empty_backward(inputs, given._replace(dlse=None))
    tangents = Tangents(*(None if x is None else materialized(x) for x in direction.tangents))
    dlse = None if given.dlse is None else materialized(given.dlse)
    given = given._replace(dout=materialized(given.dout), dlse=dlse)

    def run(chosen: Backend) -> Grads:
        along = direction._replace(tangents=tangents)
        if along.out_t is None and not chosen.finds_direction:
            _, _, out_t, lse_t = jvp(problem, inputs, tangents, backend)
            along = Direction(tangents, out_t, lse_t)
        return chosen.double_backward(problem, inputs, given, along)

    return _derive("double_backward", problem, inputs, backend, run)


def _derive(derivative: str, problem: Problem, inputs: Inputs, backend: str, run: Callable[[Backend], Result]) -> Result:
    """A derivative by the first backend that has it."""
    chosen = dispatch.select(problem, inputs, backend, derivative=derivative).backend
    with own_precision(problem.device):
        while True:
            try:
                return run(chosen)
            except KernelError as error:
                chosen = dispatch.next_backend(chosen, error, problem, inputs, backend, derivative=derivative)


def own_precision(device: str) -> AbstractContextManager[object]:
    """Autocast has had its say in the dtype of q, k and v; it must not cast what a backend computes with."""
    return torch.autocast(device, enabled=False) if any_autocast() and torch.is_autocast_enabled(device) else _AS_IT_IS


def empty_forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    out, lse = empty_out(inputs.q, problem.head_dim_v).zero_(), empty_lse(inputs.q, problem.precision)
    if inputs.sinks is None:
        return out, lse.fill_(float("-inf"))
    return out, lse.copy_(inputs.sinks.to(lse.dtype)[:, None].expand_as(lse))


def empty_backward(inputs: Inputs, given: BackwardInputs) -> Grads:
    needs, dlse = given.needs, given.dlse
    wanted = zip((*inputs[:3], inputs.bias, inputs.sinks), needs, strict=True)
    grads = Grads(*(torch.zeros_like(x) if need and x is not None else None for x, need in wanted))
    if needs.dsinks and inputs.sinks is not None and dlse is not None:
        return grads._replace(dsinks=sink_gradient(inputs.sinks, given.lse, -dlse))
    return grads
