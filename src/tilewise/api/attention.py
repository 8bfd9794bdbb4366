"""`attention`: exact attention over a batch, the same meaning on every backend."""

from __future__ import annotations

import inspect
from types import NoneType
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from tilewise import dispatch
from tilewise.api.bias import Alibi
from tilewise.api.describe import LAYOUTS, Options, Request, autocast, check_tensors, describe
from tilewise.api.keywords import hide, refuse
from tilewise.api.known import Known, aligned
from tilewise.api.names import BackendName, Layout, Precision
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
    layout: Layout


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
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
    layout: Layout = "bhsd",
    precision: Precision = "default",
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: BackendName = "auto",
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale·QKᵀ, masked)·V, exactly and in O(N) memory.

    Scores are scaled, capped, biased and masked in this order; sinks join each row's denominator; dropout comes last. A row
    that sees no key gives 0, and −inf as its log-sum-exp.

    q: queries (B, Hq, Sq, D) in float16, bfloat16, float32 or float64.
    k: keys (B, Hk, Sk, D); Hq is a multiple of Hk, and each key head serves Hq / Hk query heads.
    v: values (B, Hk, Sk, Dv).
    mask: which keys a query sees: causal(), window(n), prefix(n), documents(ids), key_padding(lengths), blocks(table, size),
        dense(m), joined by &, | and ~; or a boolean tensor that broadcasts to (B, Hq, Sq, Sk), True = attend. None: all keys.
    scale: what scores are multiplied by; 1/√D if None.
    bias: added to the scores: a floating-point tensor that broadcasts to (B, Hq, Sq, Sk), which may require a gradient, or
        alibi(slopes), which is never stored. −inf hides a key.
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    sinks: (Hq,), one more score for each head, which takes part in the softmax and has no value.
    dropout_p: the probability with which a weight is dropped, in [0, 1).
    seed: an int, or a tensor with one integer, that fixes what is dropped, the same on every backend; None draws one.
    layout: "bhsd" as above, or "bshd" with the sequence before the heads, in q, k, v and the output.
    precision: "default"; "tf32", which lets float32 products be rounded where that is faster; "compensated", which sums with
        a correction term.
    deterministic: True for the same bits run after run; None follows torch.use_deterministic_algorithms.
    return_lse: also return the log-sum-exp.
    backend: "auto", or one by name, which never falls back; `backends()` says which are usable here.

    Returns out (B, Hq, Sq, Dv); with `return_lse` also the log-sum-exp (B, Hq, Sq), natural, differentiable.

    >>> out = tw.attention(q, k, v)                                                # every query sees every key
    >>> out = tw.attention(q, k, v, mask=tw.causal() & tw.window(4096))            # the last 4096 keys
    >>> out = tw.attention(q, k, v, mask=tw.causal() & tw.documents(ids))          # ids (B, S): packed documents
    >>> out = tw.attention(q, k, v, mask=padding[:, None, None, :])                # booleans (B, Sk), True = attend
    >>> out, lse = tw.attention(q, k, v, bias=tw.alibi(slopes), return_lse=True)   # slopes (Hq,)
    >>> out = tw.attention(q, k, v, mask=tw.causal(), layout="bshd", dropout_p=0.1, seed=7)
    """
    if unknown:
        refuse("attention", unknown, inspect.signature(attention).parameters)
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
                return profiled(FORWARD, usual.launch, q, k, v)  # type: ignore[union-attr, no-any-return]
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


hide(attention)


def prepare(q: Tensor, k: Tensor, v: Tensor, request: Request, layout: str = "bhsd") -> tuple[Problem, Inputs]:
    """The problem and its inputs in the inside layout; raises for what makes no sense."""
    if layout not in LAYOUTS:
        raise LayoutError(f"layout: got {layout!r}, need 'bhsd' (batch, heads, sequence, dim) or 'bshd'")
    q, k, v = autocast((q, k, v))
    check_tensors(q, k, v, 4, "(batch, heads, sequence, dim)" if layout == "bhsd" else "(batch, sequence, heads, dim)")
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
