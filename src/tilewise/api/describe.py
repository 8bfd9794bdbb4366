"""From a user's arguments to a Problem and its Inputs: every check that needs tensors is here."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from tilewise.api.bias import Alibi
from tilewise.api.lengths import check_lengths
from tilewise.api.names import BackendName, Precision
from tilewise.backends.base import Inputs
from tilewise.errors import ArgumentError, ArgumentTypeError, DeviceError, LayoutError
from tilewise.masks import Binding, Full, Lowered, Mask, MaskShape, dense
from tilewise.masks.algebra import INTEGERS
from tilewise.ops.tensors import ARGUMENTS, materialized, refuse_tangents, refuse_transformed, refuse_unknown
from tilewise.problem import ITEMSIZE, Problem, unboxed

LAYOUTS = ("bhsd", "bshd")
SEED_RANGE = 2**63 - 1
_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(kind)
)
"""Devices that know autocast. Asked once, here: before torch 2.12 the compiler cannot trace the question."""
_FULL = Full()
_transforms = torch._C._functorch.peek_interpreter_stack


class Request(NamedTuple):
    """The optional arguments of a call, as given; `needs_lse`: the caller gets to see the log-sum-exp."""

    mask: Mask | Tensor | None = None
    scale: float | None = None
    bias: Tensor | Alibi | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: int | Tensor | None = None
    precision: str = "default"
    deterministic: bool | None = None
    needs_lse: bool = True


class Arguments(TypedDict, total=False):
    """The same as keywords."""

    mask: Mask | Tensor | None
    scale: float | None
    bias: Tensor | Alibi | None
    softcap: float
    sinks: Tensor | None
    dropout_p: float
    seed: int | Tensor | None
    precision: Precision
    deterministic: bool | None


class Options(Arguments, total=False):
    """What the public functions take, for their overloads."""

    backend: BackendName


def autocast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What SDPA does under autocast: floating tensors of the device become the autocast dtype, fp64 stays.

    It comes before the checks, which want one dtype; what is no tensor is left for them to name.
    """
    if not all(isinstance(t, Tensor) for t in tensors):
        return tensors
    device = tensors[0].device.type
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, rank: int, shape: str) -> None:
    """Types, ranks, devices and dtypes of q, k and v as the user gave them."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"{name}: got {type(tensor).__name__}, need a torch.Tensor")
        check_dense(name, tensor)
        if tensor.ndim != rank:
            raise LayoutError(f"{name}: rank {tensor.ndim}, shape {tuple(tensor.shape)}; need rank {rank}, {shape}")
        if tensor.dtype != q.dtype:
            raise ArgumentTypeError(
                f"{name}: dtype {tensor.dtype}, but q has {q.dtype}; convert with {name}.to(q.dtype)"
            )
        if tensor.device != q.device:
            raise DeviceError(f"{name}: on {tensor.device}, but q is on {q.device}; move it with {name}.to(q.device)")
    if str(q.dtype).removeprefix("torch.") not in ITEMSIZE:
        raise ArgumentTypeError(f"q: dtype {q.dtype}, need float16, bfloat16, float32 or float64")


def check_dense(name: str, x: Tensor) -> None:
    if x.layout != torch.strided or x.is_nested:
        got = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        raise LayoutError(f"{name}: got {got}, need a dense one; see {name}.to_dense() and attention_varlen")


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes that must agree, in the inside layout (B, H, S, D)."""
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        raise LayoutError(f"batch: q has {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}; they must agree")
    if k.shape[1] != v.shape[1]:
        raise LayoutError(f"heads: k has {k.shape[1]} and v {v.shape[1]}; they must agree")
    if k.shape[2] != v.shape[2]:
        raise LayoutError(f"keys: k has {k.shape[2]} positions and v {v.shape[2]}; they must agree")
    if k.shape[3] != q.shape[3]:
        raise LayoutError(f"head dim: q has {q.shape[3]} and k {k.shape[3]}; they must agree (v may differ)")


def describe(
    qkv: tuple[Tensor, Tensor, Tensor], request: Request, packed: tuple[Tensor, Tensor] | None = None
) -> tuple[Problem, Inputs]:
    """The Problem and Inputs of a call; q, k, v in the inside layout, `packed` the cumulative lengths of a packed batch."""
    q, k, v = qkv
    check_shapes(q, k, v)
    batch = q.shape[0] if packed is None else packed[0].shape[0] - 1
    shape = MaskShape(batch, q.shape[1], q.shape[2], k.shape[2])
    bias, slopes = _split_bias(request.bias, q, shape, packed is not None)
    sinks = _check_sinks(request.sinks, q, shape.heads)
    deterministic = request.deterministic
    if deterministic not in (None, True, False):
        raise ArgumentTypeError(f"deterministic: got {deterministic!r}, need True, False or None (torch's own switch)")
    grads = (q, k, v, *(t for t in (bias, sinks) if t is not None))
    problem = Problem(
        batch=batch,
        heads=shape.heads,
        kv_heads=k.shape[1],
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        mask=_bind_mask(request.mask, shape, packed, q.device),
        scale=1.0 / math.sqrt(max(q.shape[3], 1)) if request.scale is None else unboxed(request.scale),
        softcap=unboxed(request.softcap),
        bias=None if bias is None else (bias.shape[0], bias.shape[1], bias.shape[2], bias.shape[3]),
        alibi=slopes is not None,
        sinks=sinks is not None,
        dropout_p=unboxed(request.dropout_p),
        varlen=packed is not None,
        precision=request.precision,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else bool(deterministic),
        needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in grads),
        needs_lse=request.needs_lse,
        device=q.device.type,
    )
    problem.check()
    _ = problem.program  # lowered now: a mask that cannot be is refused before anything runs
    seed = make_seed(request.seed, q.device) if problem.dropout_p else None
    cu_q, cu_k = packed or (None, None)
    inputs = Inputs(q, k, v, bias, slopes, sinks, seed, cu_q, cu_k)
    refuse_tangents(inputs)
    if torch.compiler.is_compiling():  # elsewhere the operator sees the tensors as they are
        refuse_unknown((*zip(ARGUMENTS, inputs, strict=True), *(("mask", x) for x in problem.program.tensors)))
    elif _transforms() is not None:
        refuse_transformed(inputs)
    return problem, inputs


def check_range(name: str, x: Tensor) -> None:
    """Raise on integers that 32 bits do not hold; not on a GPU, which had to be waited for, nor of traced values."""
    if x.dtype != torch.int64 or x.device.type != "cpu" or type(x) is not Tensor or torch.compiler.is_compiling():
        return
    least, most = (int(bound) for bound in x.aminmax()) if x.numel() else (0, 0)
    if least < -(2**31) or most >= 2**31:
        raise ArgumentError(f"{name}: holds integers from {least} to {most}, need integers of 32 bits")


def make_seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """The dropout key as an int64 scalar; drawn by a torch op if none is given, so that checkpointing replays it."""
    if seed is None:
        return torch.randint(SEED_RANGE, (), device=device)
    seed = unboxed(seed)
    if isinstance(seed, Tensor):
        check_dense("seed", seed)
        if seed.numel() != 1 or str(seed.dtype).removeprefix("torch.") not in INTEGERS:
            raise ArgumentTypeError(
                f"seed: tensor of shape {tuple(seed.shape)} and dtype {seed.dtype}, need one integer"
            )
        if seed.device != device and seed.device.type != "cpu":
            raise DeviceError(f"seed: on {seed.device}, but q is on {device}; move it with .to(q.device)")
        return seed.to(torch.int64).reshape(())
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentTypeError(f"seed: got {seed!r}, need an integer or a tensor with one")
    if not -(2**63) <= seed < 2**63:
        raise ArgumentError(f"seed: {seed} does not fit in 64 bits")
    return torch.full((), seed, dtype=torch.int64, device=device)


def _bind_mask(mask: Any, shape: MaskShape, packed: tuple[Tensor, Tensor] | None, device: torch.device) -> Mask:
    """The mask with its tensors on the device; one without tensors stays the value it is."""
    if mask is None:
        return _FULL
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise ArgumentTypeError(
                f"mask: got {mask.dtype}, need a boolean tensor (True = attend); additive masks are passed as bias="
            )
        mask = dense(mask)
    if not isinstance(mask, Mask):
        raise ArgumentTypeError(
            f"mask: got {type(mask).__name__}, need a mask such as causal(), or a boolean tensor (True = attend)"
        )
    if mask.static:
        return mask

    def asarray(x: Any) -> Tensor:
        if isinstance(x, Tensor) and x.device != device:
            raise DeviceError(f"mask: holds a tensor on {x.device}, but q is on {device}; move it with .to(q.device)")
        if isinstance(x, Tensor):
            check_dense("mask", x)
        # the memory of an array is copied: nobody would notice if it changed before the backward
        tensor = torch.tensor(x, device=device) if isinstance(x, np.ndarray) else torch.as_tensor(x, device=device)
        check_range("mask", tensor)
        return tensor if torch.compiler.is_compiling() else materialized(tensor)

    lowered = Lowered(mask.lower(Binding(shape, packed is not None, asarray)))
    check_lengths(mask, shape, None if packed is None else packed[1])
    return lowered


def _split_bias(bias: Any, q: Tensor, shape: MaskShape, varlen: bool) -> tuple[Tensor | None, Tensor | None]:
    """A tensor bias as rank 4, or the slopes of ALiBi as (B or 1, H)."""
    if bias is None:
        return None, None
    tensor = bias.slopes if isinstance(bias, Alibi) else bias
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ArgumentTypeError(
            f"bias: got {got}, need a floating-point tensor or alibi(slopes); boolean masks are passed as mask="
        )
    _check_floating("bias", tensor)
    if tensor.device != q.device:
        raise DeviceError(f"bias: on {tensor.device}, but q is on {q.device}; move it with .to(q.device)")
    if isinstance(bias, Alibi):
        slopes = tensor.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
        slopes = slopes if tensor.ndim == 2 else slopes[None]
        shared = tensor.ndim == 1 or slopes.shape[0] == shape.batch or slopes.shape[0] == 1
        if slopes.shape[1] != shape.heads or not shared:
            raise LayoutError(
                f"alibi: slopes has shape {tuple(tensor.shape)}, need ({shape.heads},) or ({shape.batch}, {shape.heads})"
            )
        return None, slopes
    if tensor.ndim > 4:
        raise LayoutError(f"bias: rank {tensor.ndim}, need at most 4, broadcastable to {tuple(shape)}")
    added = 4 - tensor.ndim
    tensor = tensor[(None,) * added]
    sizes = list(zip(tensor.shape, shape, ("batch", "heads", "queries", "keys"), strict=True))
    for size, want, axis in sizes[added:]:  # a batch that data decide is compared with nothing but itself
        if size != want and size != 1 and not (varlen and axis in ("queries", "keys")):
            raise LayoutError(
                f"bias: {size} along {axis}, the problem has {want}; need 1 or {want} (shape {tuple(bias.shape)})"
            )
    return tensor, None


def _check_floating(name: str, x: Tensor) -> None:
    """A dense tensor of a kind that kernels read."""
    check_dense(name, x)
    if str(x.dtype).removeprefix("torch.") not in ITEMSIZE:
        raise ArgumentTypeError(
            f"{name}: dtype {x.dtype}, need float16, bfloat16, float32 or float64; convert with .to(q.dtype)"
        )


def _check_sinks(sinks: Any, q: Tensor, heads: int) -> Tensor | None:
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        raise ArgumentTypeError(
            f"sinks: got {getattr(sinks, 'dtype', type(sinks).__name__)}, need a floating-point tensor ({heads},)"
        )
    _check_floating("sinks", sinks)
    if sinks.device != q.device:
        raise DeviceError(f"sinks: on {sinks.device}, but q is on {q.device}; move it with .to(q.device)")
    if tuple(sinks.shape) != (heads,):
        raise LayoutError(f"sinks: shape {tuple(sinks.shape)}, need one for each query head, ({heads},)")
    return sinks
