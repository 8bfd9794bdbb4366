"""What no backend sees in a tensor: forward-mode tangents, values that only a bit stands for, and subclasses' own meanings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.backends.base import Grads, Inputs, Needs, Tangents
from tilewise.errors import ArgumentTypeError, DerivativeError
from tilewise.masks import Lowered, MaskProgram
from tilewise.problem import Problem

_functorch: Any = torch._C._functorch
_dispatch_modes = torch._C._len_torch_dispatch_stack
_batched = torch._C._functorch.is_legacy_batchedtensor  # what `is_grads_batched` passes; `torch.func.vmap` has its stack
PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose memory holds their values, and nothing else."""

ARGUMENTS = ("q", "k", "v", "bias", "bias", "sinks", "seed", "cu_seqlens_q", "cu_seqlens_k", "origins")
"""The fields of Inputs as the user calls them."""
DIFFERENTIABLE = tuple(Inputs._fields.index(name.removeprefix("d")) for name in Grads._fields)
"""The places among the Inputs of those that Grads and Needs speak of."""
COUNT, MOVING = len(Inputs._fields), len(Tangents._fields)


def tensor_fields(inputs: Inputs) -> dict[str, Any]:
    """The fields of a Problem that its tensors tell."""
    q = inputs.q
    batch, heads, seqlen_q, head_dim = q.shape
    _, kv_heads, seqlen_k, head_dim_v = inputs.v.shape
    return {
        "batch": batch if inputs.cu_q is None else inputs.cu_q.shape[0] - 1,
        "heads": heads,
        "kv_heads": kv_heads,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "dtype": dtype_name(q),
        "bias": None if inputs.bias is None else tuple(inputs.bias.shape),
        "alibi": inputs.alibi is not None,
        "sinks": inputs.sinks is not None,
        "varlen": inputs.cu_q is not None,
        "origins": inputs.origins is not None,
        "device": q.device.type,
        "interleaved": interleaved(inputs.k, inputs.v),
    }


def interleaved(k: Tensor, v: Tensor) -> bool:
    """Do the heads of a token lie side by side? Not asked of what is traced: kernels see the tensors themselves."""
    if torch.compiler.is_compiling():
        return False
    return all(0 < x.stride(1) < x.stride(2) for x in (k, v))


def checks_values(device: torch.device) -> bool:
    """Are lengths, cumulative lengths and indices looked at before they are used?

    On a CPU always. On a GPU that would wait for the device: only with TILEWISE_CHECK=1; kernels touch nothing outside.
    """
    return device.type == "cpu" or (device.type == "cuda" and os.environ.get("TILEWISE_CHECK") == "1")


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def needs_of(required: Sequence[bool]) -> Needs:
    """Which gradients are wanted, from what autograd says of all inputs."""
    return Needs(*[required[i] for i in DIFFERENTIABLE])


def by_input(grads: Sequence[Tensor | None], needs: Needs, count: int) -> Sequence[Tensor | None]:
    """The gradients wanted, each at the place of its input among all `count`."""
    placed: list[Tensor | None] = [None] * count
    for i, grad, need in zip(DIFFERENTIABLE, grads, needs, strict=True):
        if need:
            placed[i] = grad
    return placed


def tangents_of(inputs: Inputs) -> Tangents | None:
    """The forward-mode tangents of the inputs at the level that is at work here; None where there are none.

    Tensors of other transforms are theirs to unwrap: what they hold comes back here with their wrappers off.
    """
    if forward_ad._current_level < 0:
        return None
    found = Tangents(*(None if inputs[i] is None else _tangent(inputs[i]) for i in DIFFERENTIABLE))
    if inputs.alibi is not None and _tangent(inputs.alibi) is not None:
        raise DerivativeError(
            "alibi: the slopes have a tangent, and attention has no derivatives in them; pass a tensor bias, or slopes.detach()"
        )
    return None if all(x is None for x in found) else found


def _tangent(x: Tensor | None) -> Tensor | None:
    return None if x is None or not _is_dual(x) else forward_ad.unpack_dual(x, level=0).tangent


def primal(x: Tensor | None) -> Tensor | None:
    """x without the tangent that it has at the level at work here."""
    return x if x is None or not _is_dual(x) else forward_ad.unpack_dual(x, level=0).primal


def _is_dual(x: Tensor) -> bool:
    """Might x have a tangent of the innermost transform, or of a dual level if no transform is at work?"""
    interpreter = _functorch.peek_interpreter_stack()
    if interpreter is None:
        return forward_ad._current_level >= 0
    return bool(interpreter.key() == _functorch.TransformType.Jvp and _functorch.maybe_get_level(x) == interpreter.level())


def has_tangent(x: Tensor) -> bool:
    return _tangent(x) is not None


def refuse_forward_mode() -> None:
    """Raise rather than lose a forward-mode derivative where a call is traced, which would come out as zero."""
    if forward_ad._current_level >= 0:
        raise DerivativeError(
            "torch.compile and torch.export carry no forward-mode derivatives (torch.func.jvp, jacfwd, dual tensors) of "
            "attention; take them outside of what is compiled"
        )


def materialized(x: Tensor) -> Tensor:
    """The tensor with its values in memory, where kernels read them: torch may negate, or mean zero, by a bit."""
    if x.is_neg():
        return x.resolve_neg()
    return x.clone() if x._is_zerotensor() else x


def materialized_inputs(inputs: Inputs) -> Inputs:
    if any(x is not None and (x.is_neg() or x._is_zerotensor()) for x in inputs):
        return Inputs(*(None if x is None else materialized(x) for x in inputs))  # type: ignore[arg-type]
    return inputs


def refuse_unknown(inputs: Inputs, mask: Iterable[Tensor]) -> None:
    """Raise on a tensor, of the inputs or the mask, whose memory may mean something that only its subclass knows."""
    for name, x in (*zip(ARGUMENTS, inputs, strict=True), *(("mask", x) for x in mask)):
        if x is not None:
            plain(name, x)


def plain(name: str, x: Tensor) -> Tensor:
    """The tensor's memory as a plain tensor; raises where only the subclass knows what it means. One that is asked by operators
    stays."""
    if type(x) in PLAIN or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return x
    if _unknown(type(x)):
        raise ArgumentTypeError(
            f"{name}: got a {type(x).__name__}, a tensor subclass that attention does not know: its memory may mean "
            f"anything. If it holds plain numbers, pass {name}.as_subclass(torch.Tensor)"
        )
    return x.as_subclass(Tensor)


def check_kinds(inputs: Inputs, mask: Sequence[Tensor]) -> None:
    """Raise on tensors that no backend could read right; unknown subclasses only while tracing, since operators see them."""
    if torch.compiler.is_compiling():
        refuse_forward_mode()
        refuse_unknown(inputs, mask)


def as_read(inputs: Inputs, mask: Sequence[Tensor]) -> tuple[Inputs, list[Tensor]]:
    """The tensors of an operator's call as a backend may read them; what it could not read right is refused."""
    refuse_unknown(inputs, mask)
    return materialized_inputs(inputs), [materialized(x) for x in mask]


def _unknown(kind: Any) -> bool:
    """Does the subclass change what functions do, without being asked by operators?

    One with `__torch_dispatch__` is asked: whoever gets here was let through. One that keeps torch's own
    `__torch_function__` is no more than its memory.
    """
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    function = kind.__torch_function__
    return getattr(function, "__func__", function) not in _OWN


_OWN = (vars(Tensor)["__torch_function__"].__func__, torch.nn.Parameter.__torch_function__)


def versioned(x: Tensor | None) -> Tensor | None:
    """As autograd can save it, to see changes in place: an inference tensor counts none, so it is copied."""
    return x.clone() if x is not None and x.is_inference() else x


def with_mask(problem: Problem, tensors: Sequence[Tensor]) -> Problem:
    """The problem with the mask's tensors as they are passed, which hooks and transforms may have changed."""
    program = problem.program
    if all(a is b for a, b in zip(program.tensors, tensors, strict=True)):
        return problem
    return replace(problem, mask=Lowered(MaskProgram(program.structure, program.ints, tuple(tensors))))


def moving(tangents: Sequence[Tensor | None]) -> Tangents:
    """What moves, from a tangent for each of a call's tensors."""
    return Tangents(*(tangents[i] for i in DIFFERENTIABLE))


def spread(results: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Results that are there, each at its place among all."""
    found = iter(results)
    return tuple(next(found) if need else None for need in needs)


def present(grads: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """The gradients wanted, without gaps."""
    return tuple(grad for grad, need in zip(grads, needs, strict=True) if need and grad is not None)


def added(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return sum(there[1:], there[0]) if there else None


def watched(inputs: Inputs, mask: Sequence[Tensor]) -> bool:
    """Whether a dispatch mode, a tensor subclass or a device without memory wants an operator."""
    return bool(_dispatch_modes()) or inputs.q.is_meta or any(type(x) not in PLAIN for x in (*inputs, *mask) if x is not None)


def any_batched(*tensors: Tensor | None) -> bool:
    """Whether some come as `is_grads_batched` passes them."""
    return True in [_batched(x) for x in tensors if x is not None]


def moving_call(problem: Problem, tensors: Sequence[Tensor | None]) -> tuple[Inputs, Tangents, Problem]:
    """Inputs, tangents and the problem with its mask, from flat tensors in this order."""
    inputs, tangents = Inputs(*tensors[:COUNT]), Tangents(*tensors[COUNT : COUNT + MOVING])  # type: ignore[arg-type]
    return inputs, tangents, with_mask(problem, tensors[COUNT + MOVING :])  # type: ignore[arg-type]
