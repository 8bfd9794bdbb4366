"""What no backend sees in a tensor: forward-mode derivatives, values that only a bit stands for, and subclasses' own meanings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.backends.base import Grads, Inputs, Needs
from tilewise.errors import ArgumentTypeError, DerivativeError

_functorch: Any = torch._C._functorch
PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose memory holds their values, and nothing else."""

ARGUMENTS = ("q", "k", "v", "bias", "bias", "sinks", "seed", "cu_seqlens_q", "cu_seqlens_k", "origins")
"""The fields of Inputs as the user calls them."""
DIFFERENTIABLE = tuple(Inputs._fields.index(name.removeprefix("d")) for name in Grads._fields)
"""The places among the Inputs of those that Grads and Needs speak of."""


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
    }


def checks_values(device: torch.device) -> bool:
    """Are lengths, cumulative lengths and indices looked at before they are used?

    On a CPU always. On a GPU that would wait for the device: only with TILEWISE_CHECK=1; kernels touch nothing outside.
    """
    return device.type == "cpu" or (device.type == "cuda" and os.environ.get("TILEWISE_CHECK") == "1")


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def needs_of(required: Sequence[bool]) -> Needs:
    """Which gradients are wanted, from what autograd says of all inputs, or of q, k and v alone."""
    return Needs(*required) if len(required) == 3 else Needs(*[required[i] for i in DIFFERENTIABLE])


def by_input(grads: Sequence[Tensor | None], needs: Needs, count: int) -> Sequence[Tensor | None]:
    """The gradients wanted, each at the place of its input among all `count`, or among q, k and v alone."""
    if count == 3:
        return grads[:3]
    placed: list[Tensor | None] = [None] * count
    for i, grad, need in zip(DIFFERENTIABLE, grads, needs, strict=True):
        if need:
            placed[i] = grad
    return placed


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Raise rather than lose a forward-mode derivative, which would come out as zero."""
    if forward_ad._current_level >= 0 and any(x is not None and _has_tangent(x) for x in tensors):
        raise DerivativeError(
            "attention has no forward-mode derivatives (torch.func.jvp, jacfwd, dual tensors) yet; use reverse mode "
            "(torch.autograd.grad, backward), or backend-free code such as softmax(q @ k.mT) @ v"
        )


def _has_tangent(x: Tensor) -> bool:
    if torch.compiler.is_compiling():  # what is traced cannot be asked, and might
        return True
    while _functorch.is_batchedtensor(x):  # nor can vmap's tensors
        x = _functorch.get_unwrapped(x)
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD):  # inside an operator autograd has been passed
        return forward_ad.unpack_dual(x).tangent is not None


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)


def refuse_transformed(tensors: Iterable[Tensor | None]) -> None:
    """Raise on tensors of functorch's transforms: there are no rules for them yet."""
    for x in tensors:
        while x is not None and _functorch.is_functorch_wrapped_tensor(x):
            if _functorch.is_batchedtensor(x):
                raise DerivativeError(
                    "attention has no rule for torch.func.vmap yet; make the mapped dimension part of the batch"
                )
            if _functorch.is_gradtrackingtensor(x) and x.requires_grad and torch.is_grad_enabled():
                raise DerivativeError(
                    "attention has no rule for torch.func.grad, vjp and their like yet; use torch.autograd.grad or backward"
                )
            x = _functorch.get_unwrapped(x)


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
        if x is not None and type(x) not in PLAIN and _unknown(type(x)):
            raise ArgumentTypeError(
                f"{name}: got a {type(x).__name__}, a tensor subclass that attention does not know: its memory may mean "
                f"anything. If it holds plain numbers, pass {name}.as_subclass(torch.Tensor)"
            )


def check_kinds(inputs: Inputs, mask: Sequence[Tensor]) -> None:
    """Raise on tensors that no backend could read right; unknown subclasses only while tracing, since operators see them."""
    refuse_tangents(inputs)
    if torch.compiler.is_compiling():
        refuse_unknown(inputs, mask)
    elif _functorch.peek_interpreter_stack() is not None:
        refuse_transformed(inputs)


def as_read(inputs: Inputs, mask: Sequence[Tensor]) -> tuple[Inputs, list[Tensor]]:
    """The tensors of an operator's call as a backend may read them; what it could not read right is refused."""
    refuse_unknown(inputs, mask)
    refuse_tangents(inputs)
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
