"""The tensors of features as the kernels read them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, rounded
from tilewise.backends.gpu.launch import broadcast_strides
from tilewise.backends.hopper.features import ELEMENT, BiasForm, gradient_form, is_broadcast
from tilewise.backends.hopper.intervals import mask_of
from tilewise.problem import Problem

Features = dict[str, Any]
"""Arguments by name: tensors and numbers."""
NONE: Features = {}
ANY = 1 << 30
"""Keys of a bias that is the same for all."""


def feature_tensors(problem: Problem, inputs: Inputs) -> Features:
    """The tensors of a call, none for most. Kernels know addresses, so their types do not matter."""
    if not (problem.sinks or problem.alibi or problem.dropout_p > 0 or problem.bias is not None):
        return NONE
    found: Features = {}
    if inputs.sinks is not None:
        found["sinks_ptr"] = _as_read(inputs.sinks)
    if inputs.alibi is not None:
        found["alibi_ptr"] = _as_read(inputs.alibi)
    if inputs.bias is not None:
        found["bias_ptr"] = inputs.bias
    if problem.dropout_p > 0:
        assert inputs.seed is not None
        seed, device = inputs.seed, inputs.q.device
        found["seed_ptr"] = seed if seed.device == device else seed.to(device, non_blocking=True)
    return found


def _as_read(x: Tensor) -> Tensor:
    """fp32 without gaps. Asking costs less than having nothing converted."""
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()


def call_features(problem: Problem, inputs: Inputs, mapped: bool = False, moving: Features | None = None) -> Features:
    """All arguments of a call, made where its launches are; `moving`: those of them that are there already, as they are."""
    found = dict(feature_tensors(problem, inputs) if moving is None else moving)
    if inputs.alibi is not None:
        found["alibi_b"] = problem.heads if inputs.alibi.shape[0] > 1 else 0
    if inputs.bias is not None:
        if mapped:  # coordinates of a tensor map: sides of 1 are not stepped over
            found |= {"bias_b": int(inputs.bias.shape[0] > 1), "bias_h": int(inputs.bias.shape[1] > 1)}
        else:
            found |= bias_arguments(inputs.bias)
    if problem.dropout_p > 0:
        found["seed_ptr"] = found["seed_ptr"].reshape(1).view(torch.int32)
    return found if moving is None else found | moving


def features_key(inputs: Inputs) -> Hashable:
    """What launches depend on beside the problem and the tensors' addresses."""
    if inputs.bias is not None:  # shapes are the problem's
        return inputs.bias.dtype, inputs.bias.stride(), inputs.bias.data_ptr() % 16
    return None if inputs.alibi is None else inputs.alibi.shape[0]


def is_paired(bias: Tensor) -> bool:
    """Can two numbers of adjacent keys be read as one word?"""
    even = all(size == 1 or step % 2 == 0 for size, step in zip(bias.shape[:3], bias.stride()[:3], strict=True))
    adjacent = bias.element_size() == 2 and bias.stride(3) == 1 and bias.shape[3] % 2 == 0
    return adjacent and even and bias.data_ptr() % 4 == 0


def is_mapped(problem: Problem, bias: Tensor) -> bool:
    """Can a tensor map read it?"""
    steps = all(size == 1 or (step % 8 == 0 and step > 0) for size, step in zip(bias.shape[:3], bias.stride()[:3], strict=True))
    return is_paired(bias) and steps and bias.data_ptr() % 16 == 0 and bias.shape[2:] == (problem.seqlen_q, problem.seqlen_k)


def bias_form(bias: Tensor | None) -> str:
    """What `Config.BIAS` says of a call's bias."""
    if bias is None:
        return ""
    name = str(bias.dtype).removeprefix("torch.")
    adjacent = bias.shape[3] > 1 and bias.stride(3) == 1
    return ELEMENT[name] + ("x2" if is_paired(bias) else "" if adjacent else "s")


def backward_form(problem: Problem, bias: Tensor | None, gradient: bool) -> BiasForm | None:
    """What the configs of the backward say of a call's bias, of which a gradient may be wanted."""
    if bias is None:
        return None
    return BiasForm(bias_form(bias), gradient_form(problem) if gradient else "")


def bias_arguments(bias: Tensor) -> Features:
    rows, keys = bias.shape[2:]
    x = bias.detach().as_strided(bias.shape, broadcast_strides(bias))  # sides of 1 are not stepped over
    if is_paired(bias):
        x = x.view(torch.int32)
    b, h, q, k = x.stride()
    found: Features = {"bias_ptr": x, "bias_b": b, "bias_h": h, "bias_q": q, "bias_rows": rows}
    return found | {"bias_k": k, "bias_keys": ANY if keys == 1 else keys}


def tensors_in(features: Features) -> tuple[Tensor, ...]:
    return tuple(x for x in features.values() if isinstance(x, Tensor))


def with_features(arguments: Any, features: Features) -> Any:
    """A kernel's arguments with those that it takes."""
    return arguments._replace(**{name: x for name, x in features.items() if getattr(arguments, name, None) is not None})


def bias_gradient(problem: Problem, bias: Tensor) -> tuple[Tensor, Features]:
    """Memory for the gradient of a bias, and the arguments of the kernel that writes it. Rows begin at even places."""
    added = is_broadcast(problem)
    shape = (*bias.shape[:3], bias.shape[3] + bias.shape[3] % 2)
    whole = not (added or problem.varlen or mask_of(problem).terms)  # is every tile written?
    dtype = torch.float32 if added else bias.dtype
    memory = (torch.empty if whole else torch.zeros)(shape, dtype=dtype, device=bias.device)
    b, h, q, k = broadcast_strides(memory[..., : bias.shape[3]])
    found: Features = {"dbias_ptr": memory, "dbias_b": b // 2, "dbias_h": h // 2, "dbias_q": q // 2}
    return memory, found | {"dbias_k": k}


def rounded_gradient(memory: Tensor, bias: Tensor) -> Tensor:
    """What the kernel has written or added up, as the bias is."""
    return rounded(memory[..., : bias.shape[3]], bias.dtype).contiguous()


def sink_gradient(parts: Tensor, sinks: Tensor, rows: int) -> Tensor:
    """The gradient of sinks from what each query adds, [rows of the batch · H · queries, padded]."""
    return rounded(parts.view(rows, sinks.shape[0], -1).sum(dim=(0, 2)), sinks.dtype)
