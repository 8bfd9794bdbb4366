"""`attention`: exact attention over a batch, the same meaning on every backend."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from tilewise import dispatch
from tilewise.api.bias import Alibi
from tilewise.api.describe import LAYOUTS, Options, Request, autocast, check_tensors, describe
from tilewise.api.known import Known, aligned
from tilewise.backends.base import Backend, Inputs
from tilewise.errors import KernelError, LayoutError
from tilewise.masks import Mask
from tilewise.ops import attend
from tilewise.ops.profile import FORWARD, profiled
from tilewise.ops.run import any_autocast, is_empty
from tilewise.ops.tensors import PLAIN, materialized_inputs
from tilewise.problem import Problem

_KNOWN: dict[tuple[Any, ...], Known] = {}
"""Calls by everything they depend on."""
_USUAL: dict[tuple[Any, ...], Known] = {}
"""The last of them by all but shapes, strides and types: the next call is most often like it, and that is quickly seen."""
_LIMIT = 4096
_traced = torch.compiler.is_dynamo_compiling
_grad_mode = torch.is_grad_enabled
_deterministic = torch._C._get_deterministic_algorithms
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


class _Options(Options, total=False):
    layout: str


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | Alibi | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    layout: str = "bhsd",
    precision: str = "default",
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale·QKᵀ, masked)·V, exactly and in O(N) memory.

    q is (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv), Hq a multiple of Hk; `layout="bshd"` has the sequence before the
    heads. Scores are scaled (1/√D unless given), capped, biased and masked in this order; `sinks` (Hq,) join each row's
    denominator; dropout comes last. A row that sees no key gives 0, and −inf as its log-sum-exp.

    Returns out, like q with Dv columns; with `return_lse` also the log-sum-exp (B, Hq, Sq), which is differentiable.
    """
    settings: tuple[Any, ...] | None = None
    if bias is None and sinks is None and not _traced():
        try:
            # `standing` and `modes_active` are written out: a tiny attention pays for every call
            registry = dispatch.REGISTRY
            settings = (
                mask, scale, softcap, dropout_p, precision, deterministic, layout, backend, return_lse,
                type(scale), type(softcap), type(dropout_p), _grad_mode(), _deterministic(),
                registry.get(backend), len(registry),
            )  # fmt: skip
            usual = _USUAL.get(settings)
            like = (
                usual is not None
                and not (q.is_nested or k.is_nested or v.is_nested)  # torch's guard would end the process
                and usual.like(q, k, v)  # not under functorch's transforms, by their keys
                and (usual.aligned is None or usual.aligned == aligned(q, k, v))
                and not _dispatch_modes()
                and forward_ad._current_level < 0
            )
        except (AttributeError, TypeError, RuntimeError):  # no tensor, no hash, no strides: the checks will name it
            settings, like = None, False
        if like:
            if profiler._is_profiler_enabled:
                return profiled(FORWARD, usual.launch, q, k, v)  # type: ignore[union-attr]
            return usual.launch(q, k, v)  # type: ignore[union-attr]
    request = Request(mask, scale, bias, softcap, sinks, dropout_p, seed, precision, deterministic, bool(return_lse))
    key, known = (None, None) if torch.compiler.is_compiling() else _recall(q, k, v, request, layout, backend)
    if known is None:
        problem, inputs = prepare(q, k, v, request, layout)
        if key is None or is_empty(problem):
            out, lse = run(problem, inputs, backend)
            out = out.transpose(1, 2) if layout == "bshd" else out
            return (out, lse) if return_lse else out
        known = _known(problem, inputs, (q, k, v), layout, backend)
        _keep(_KNOWN, key, known)
    if settings is not None:
        _keep(_USUAL, settings, known.expect(q, k, v))
    return profiled(FORWARD, known.launch, q, k, v)


def prepare(q: Tensor, k: Tensor, v: Tensor, request: Request, layout: str = "bhsd") -> tuple[Problem, Inputs]:
    """The problem and its inputs in the inside layout; raises for what makes no sense."""
    if layout not in LAYOUTS:
        raise LayoutError(f"layout: got {layout!r}, need 'bhsd' (batch, heads, sequence, dim) or 'bshd'")
    check_tensors(q, k, v, 4, "(batch, heads, sequence, dim)" if layout == "bhsd" else "(batch, sequence, heads, dim)")
    q, k, v = autocast((q, k, v))
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return describe((q, k, v), request)


def run(problem: Problem, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """Through the operator where something watches operators, straight to the backend otherwise."""
    if torch.compiler.is_compiling() or watched(problem, inputs):
        from tilewise.ops import library  # operators take a while to define, and a plain call needs none

        dispatch.check_name(backend)
        return library.attend(problem, inputs, backend)
    inputs = materialized_inputs(inputs)
    chosen = None if is_empty(problem) else choose(problem, inputs, backend)
    return profiled(FORWARD, attend, problem, inputs, backend, chosen)


def choose(problem: Problem, inputs: Inputs, backend: str) -> Backend:
    """The backend of the forward; a backend asked for by name must be able to do the backward too, if there will be one."""
    if problem.needs_grad and backend != "auto":
        dispatch.select(problem, inputs, backend, backward=True)
    return dispatch.select(problem, inputs, backend).backend


def watched(problem: Problem, inputs: Inputs) -> bool:
    """Whether a tensor subclass, a device without memory, a dispatch mode or a functorch transform wants an operator."""
    tensors = (*inputs, *problem.program.tensors)
    return modes_active() or problem.device == "meta" or any(x is not None and type(x) not in PLAIN for x in tensors)


def modes_active() -> bool:
    return bool(_dispatch_modes()) or _transforms() is not None or forward_ad._current_level >= 0


def _known(
    problem: Problem, inputs: Inputs, given: tuple[Tensor, Tensor, Tensor], layout: str, backend: str
) -> Known:
    """What is to be remembered of a call, on the first backend whose kernels can be made."""
    chosen = choose(problem, inputs, backend)
    while True:
        try:
            return Known.of(problem, inputs, chosen, given, layout, backend)
        except KernelError as error:
            chosen = dispatch.instead(chosen, error, problem, inputs, backend)


def _keep(memory: dict[tuple[Any, ...], Known], key: tuple[Any, ...], known: Known) -> None:
    if len(memory) >= _LIMIT:
        memory.clear()
    memory[key] = known


def _recall(
    q: Tensor, k: Tensor, v: Tensor, request: Request, layout: str, backend: str
) -> tuple[tuple[Any, ...] | None, Known | None]:
    """The key of a call, and what is remembered of one like it."""
    try:
        key = _key(q, k, v, request, layout, backend)
        return key, None if key is None else _KNOWN.get(key)
    except (AttributeError, TypeError, RuntimeError):  # an argument without shape or hash: the checks will name it
        return None, None


def _key(q: Tensor, k: Tensor, v: Tensor, request: Request, layout: str, backend: str) -> tuple[Any, ...] | None:
    """What a problem and the choice of its backend depend on; None for calls that are prepared afresh each time."""
    mask, scale, bias, softcap, sinks, dropout_p, _, precision, deterministic, needs_lse = request
    if bias is not None or sinks is not None or dropout_p or modes_active():
        return None
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN or q.is_meta:
        return None
    if any(x.is_neg() or x._is_zerotensor() for x in (q, k, v)):  # values that only a bit stands for
        return None
    if mask is not None and not (isinstance(mask, Mask) and mask.static):
        return None
    if any_autocast() or not isinstance(scale, (float, int, NoneType)):
        return None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    grad = (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
    # a sparse tensor has no strides to ask for: it ends in the checks
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        mask, scale, softcap, type(scale), type(softcap), type(dropout_p), precision, deterministic, grad, layout, needs_lse,
        aligned(q, k, v), *dispatch.standing(backend),
    )  # fmt: skip
