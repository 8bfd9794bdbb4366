"""Run a parsed call: through the operator where something watches operators, straight to the backend otherwise."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch
from tilewise.api.options import ParsedOptions
from tilewise.api.parse import parse_call
from tilewise.api.statistics import user_statistics
from tilewise.backends.base import Backend, Inputs
from tilewise.ops.autograd import attend, attend_transformed
from tilewise.ops.plain import PlainCall, attend_plain
from tilewise.ops.run import FORWARD, is_empty, profiled
from tilewise.ops.tensors import PLAIN, materialized_inputs
from tilewise.problem import Problem

_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def execute(q: Tensor, k: Tensor, v: Tensor, options: ParsedOptions, backend: str) -> Any:
    """A call from its arguments to its result in the user's layout."""
    problem, inputs = parse_call(q, k, v, options)
    if problem.stats:
        return execute_statistics(problem, inputs, options.get("layout", "bhsd"), backend)
    if not torch.compiler.is_compiling() and transforms_active():
        dispatch.check_name(backend, "auto")
        out, lse = _untraced(attend_transformed)(problem, inputs, backend)
    elif torch.compiler.is_compiling() or _is_watched(problem, inputs):
        from tilewise.ops import library  # operators take a while to define, and a plain call needs none

        dispatch.check_name(backend, "auto")
        out, lse = library.attend(problem, inputs, backend)
    else:
        inputs = materialized_inputs(inputs)
        if is_empty(problem):
            out, lse = profiled(FORWARD, attend, problem, inputs, backend)
        else:
            call = PlainCall.of(problem, inputs, backend, choose(problem, inputs, backend))
            out, lse = profiled(FORWARD, attend_plain, call, inputs)
    return restore_layout(problem, options.get("layout", "bhsd"), out, lse)


def _untraced(function: Any) -> Any:
    """A function that torch.compile does not follow: where a graph breaks for a transform, it would trace kernels being built."""
    compiler = sys.modules.get("torch._dynamo")
    return function if compiler is None else compiler.disable(function)


def execute_statistics(problem: Problem, inputs: Inputs, layout: str, backend: str) -> tuple[Any, ...]:
    from tilewise.ops import statistics  # a plain call needs none

    dispatch.check_name(backend, "auto")
    if not torch.compiler.is_compiling() and transforms_active():
        statistics.refuse()
    if torch.compiler.is_compiling() or _is_watched(problem, inputs):
        from tilewise.ops import library_statistics

        out, lse, found = library_statistics.attend(problem, inputs, backend)
    else:
        out, lse, found = profiled(FORWARD, statistics.attend, problem, materialized_inputs(inputs), backend)
    result = restore_layout(problem, layout, out, lse)
    return (*(result if isinstance(result, tuple) else (result,)), user_statistics(problem, found))


def restore_layout(problem: Problem, layout: str, out: Tensor, lse: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """The result as the user's q was laid out, with the log-sum-exp if it is wanted."""
    if problem.varlen:
        out, lse = out.squeeze(0).transpose(0, 1), None if lse is None else lse.squeeze(0)
    elif layout == "bshd":
        out = out.transpose(1, 2)
    return out if lse is None or not problem.needs_lse else (out, lse)


def choose(problem: Problem, inputs: Inputs, backend: str) -> Backend:
    """The backend of the forward; a backend asked for by name must be able to do the backward too, if there will be one."""
    if problem.needs_grad and backend != "auto":
        dispatch.select(problem, inputs, backend, backward=True)
    return dispatch.select(problem, inputs, backend).backend


def _is_watched(problem: Problem, inputs: Inputs) -> bool:
    """Whether a tensor subclass, a device without memory or a dispatch mode wants an operator."""
    tensors = (*inputs, *problem.program.tensors)
    return bool(_dispatch_modes()) or problem.device == "meta" or any(x is not None and type(x) not in PLAIN for x in tensors)


def transforms_active() -> bool:
    """Whether functorch or forward-mode differentiation may have its hands on tensors."""
    return _transforms() is not None or forward_ad._current_level >= 0


def modes_active() -> bool:
    return bool(_dispatch_modes()) or transforms_active()
