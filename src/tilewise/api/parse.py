"""From a user's arguments to a Problem and its Inputs: `parse_call` serves every function that takes a call, run or not."""

from __future__ import annotations

import math
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from tilewise.api.bias import Alibi
from tilewise.api.keywords import check_keywords
from tilewise.api.lengths import check_values
from tilewise.api.options import DEFAULTS, CallOptions, ParsedOptions
from tilewise.backends.base import Inputs
from tilewise.errors import ArgumentError, ArgumentTypeError, DeviceError, LayoutError
from tilewise.masks import Binding, Full, Lowered, Mask, MaskShape, dense
from tilewise.masks.arrays import INTEGERS
from tilewise.ops.tensors import check_kinds, dtype_name, materialized, tensor_fields
from tilewise.problem import ITEMSIZE, WIDE, Problem, stats_request, tile_request, unboxed

LAYOUTS = {"bhsd": "(batch, heads, sequence, dim)", "bshd": "(batch, sequence, heads, dim)"}
SEED_RANGE = 2**63 - 1
_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(kind)
)
"""Devices that know autocast. Asked once, here: before torch 2.12 the compiler cannot trace the question."""
_FULL = Full()


def parse_call(
    q: Tensor, k: Tensor, v: Tensor, options: CallOptions | ParsedOptions, *, needs_seed: bool = False
) -> tuple[Problem, Inputs]:
    """The problem of a call and its inputs in the inside layout (B, H, S, D); raises for what makes no sense.

    `needs_seed`: the result of an earlier call is looked at, so dropout needs the seed of that call.
    """
    check_keywords("attention", options, DEFAULTS)
    options = {**DEFAULTS, **options}
    if needs_seed and options["dropout_p"] and options["seed"] is None:
        raise ArgumentError("seed: dropout_p is set and seed is not; pass the seed that the call used")
    q, k, v = autocast((q, k, v))
    if options["cu_seqlens_q"] is not None:
        check_tensors(q, k, v, 3, "(tokens, heads, dim)")
        cu = _check_packing(options, q, k)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return build_problem(Inputs(q, k, v, cu_q=cu[0], cu_k=cu[1]), options)
    layout = options["layout"]
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise LayoutError(f"layout: got {layout!r}, need 'bhsd' (batch, heads, sequence, dim) or 'bshd'")
    check_tensors(q, k, v, 4, LAYOUTS[layout])
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return build_problem(Inputs(q, k, v), options)


def build_problem(inputs: Inputs, options: ParsedOptions, **fields: Any) -> tuple[Problem, Inputs]:
    """The Problem of tensors in the inside layout, with `fields` that neither they nor the options tell, and the Inputs with
    what the options add to them."""
    q, k, v, cu_q, cu_k = *inputs[:3], inputs.cu_q, inputs.cu_k
    check_shapes(q.shape, k.shape, v.shape)
    batch, heads, seqlen_q, head_dim = q.shape
    shape = MaskShape(batch if cu_q is None else cu_q.shape[0] - 1, heads, seqlen_q, k.shape[2])
    bias, slopes = split_bias(options["bias"], q, shape, cu_q is not None, options["precision"])
    sinks = check_sinks(options["sinks"], q, heads)
    inputs = Inputs(q, k, v, bias, slopes, sinks, None, cu_q, cu_k)
    scale, deterministic = options["scale"], options["deterministic"]
    if deterministic not in (None, True, False):
        raise ArgumentTypeError(f"deterministic: got {deterministic!r}, need True, False or None (torch's own switch)")
    problem = Problem(
        **{**tensor_fields(inputs), **fields},
        mask=_bind_mask(options["mask"], shape, inputs),
        scale=1.0 / math.sqrt(max(head_dim, 1)) if scale is None else unboxed(scale),
        softcap=unboxed(options["softcap"]),
        dropout_p=unboxed(options["dropout_p"]),
        precision=options["precision"],
        tile=tile_request(options["tile"]),
        stats=stats_request(options["stats"]),
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else bool(deterministic),
        needs_grad=torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, bias, sinks) if x is not None),
        needs_lse=bool(options["return_lse"]),
    )
    problem.check()
    _ = problem.program  # lowered now: a mask that cannot be is refused before anything runs
    if problem.dropout_p:
        inputs = Inputs(q, k, v, bias, slopes, sinks, make_seed(options["seed"], q.device), cu_q, cu_k)
    check_kinds(inputs, problem.program.tensors)
    return problem, inputs


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
        check_device(name, tensor, q.device)
    if dtype_name(q) not in ITEMSIZE:
        raise ArgumentTypeError(f"q: dtype {q.dtype}, need float16, bfloat16, float32 or float64")


def check_dense(name: str, x: Tensor) -> None:
    if x.layout != torch.strided or x.is_nested:
        got = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        raise LayoutError(f"{name}: got {got}, need a dense one; see {name}.to_dense() and attention_varlen")


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise DeviceError(f"{name}: on {x.device}, but q is on {device}; move it with {name}.to(q.device)")


def check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    """Shapes that must agree, in the inside layout (B, H, S, D)."""
    if k[0] != q[0] or v[0] != q[0]:
        raise LayoutError(f"batch: q has {q[0]}, k {k[0]}, v {v[0]}; they must agree")
    if k[1] != v[1]:
        raise LayoutError(f"heads: k has {k[1]} and v {v[1]}; they must agree")
    if k[2] != v[2]:
        raise LayoutError(f"keys: k has {k[2]} positions and v {v[2]}; they must agree")
    if k[3] != q[3]:
        raise LayoutError(f"head dim: q has {q[3]} and k {k[3]}; they must agree (v may differ)")


def _check_packing(options: ParsedOptions, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Both cumulative lengths, of 32 bits; their values are checked where they are read (`ops.packing`)."""
    cu_q, cu_k = options["cu_seqlens_q"], options["cu_seqlens_k"]
    cu_k = cu_q if cu_k is None else cu_k
    for name, cu, x in (("cu_seqlens_q", cu_q, q), ("cu_seqlens_k", cu_k, k)):
        if not isinstance(cu, Tensor) or dtype_name(cu) not in INTEGERS:
            got = getattr(cu, "dtype", type(cu).__name__)
            raise ArgumentTypeError(f"{name}: got {got}, need an integer tensor of cumulative lengths")
        check_dense(name, cu)
        if cu.ndim != 1 or cu.shape[0] < 1:
            raise LayoutError(f"{name}: shape {tuple(cu.shape)}, need (sequences + 1,), starting with 0")
        check_device(name, cu, x.device)
    assert cu_q is not None and cu_k is not None
    if cu_k.shape != cu_q.shape:
        raise LayoutError(f"cu_seqlens_k: {cu_k.shape[0] - 1} sequences, but cu_seqlens_q has {cu_q.shape[0] - 1}")
    same, cu_q = cu_k is cu_q, int32_lengths("cu_seqlens_q", cu_q)
    return cu_q, cu_q if same else int32_lengths("cu_seqlens_k", cu_k)


def check_range(name: str, x: Tensor) -> None:
    """Raise on integers that 32 bits do not hold; not on a GPU, which had to be waited for, nor of traced values."""
    if x.dtype != torch.int64 or x.device.type != "cpu" or type(x) is not Tensor or torch.compiler.is_compiling():
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
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
        if seed.numel() != 1 or dtype_name(seed) not in INTEGERS:
            raise ArgumentTypeError(
                f"seed: tensor of shape {tuple(seed.shape)} and dtype {seed.dtype}, need one integer"
            )
        if seed.device.type != "cpu":
            check_device("seed", seed, device)
        return seed.to(torch.int64).reshape(())
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentTypeError(f"seed: got {seed!r}, need an integer or a tensor with one")
    if not -(2**63) <= seed < 2**63:
        raise ArgumentError(f"seed: {seed} does not fit in 64 bits")
    return torch.full((), seed, dtype=torch.int64, device=device)


def _bind_mask(mask: Any, shape: MaskShape, inputs: Inputs) -> Mask:
    """The mask with its tensors on the device of the inputs; one without tensors stays the value it is."""
    k, cu_q, cu_k, device = inputs.k, inputs.cu_q, inputs.cu_k, inputs.q.device
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
        if isinstance(x, Tensor):
            check_device("mask", x, device)
            check_dense("mask", x)
        # the memory of an array is copied: nobody would notice if it changed before the backward
        tensor = torch.tensor(x, device=device) if isinstance(x, np.ndarray) else torch.as_tensor(x, device=device)
        check_range("mask", tensor)
        return tensor if torch.compiler.is_compiling() else materialized(tensor)

    program = mask.lower(Binding(shape, cu_k is not None, asarray, k.shape[1]))
    lowered = Lowered(program, None if torch.compiler.is_compiling() else ref(mask))
    check_values(mask, shape, cu_q, cu_k)
    return lowered


def split_bias(
    bias: Any, q: Tensor, shape: MaskShape, varlen: bool, precision: str
) -> tuple[Tensor | None, Tensor | None]:
    """A tensor bias as rank 4, or the slopes of ALiBi as (B or 1, H)."""
    if bias is None:
        return None, None
    wanted = "tensor or alibi(slopes); boolean masks are passed as mask="
    tensor = _check_floating("bias", bias.slopes if isinstance(bias, Alibi) else bias, q.device, wanted)
    if isinstance(bias, Alibi):
        slopes = alibi_slopes(tensor, q.dtype, precision)
        shared = tensor.ndim == 1 or slopes.shape[0] == shape.batch or slopes.shape[0] == 1
        if slopes.shape[1] != shape.heads or not shared:
            raise LayoutError(
                f"alibi: slopes has shape {tuple(tensor.shape)}, need ({shape.heads},) or ({shape.batch}, {shape.heads})"
            )
        return None, slopes
    if tensor.ndim > 4:
        raise LayoutError(f"bias: rank {tensor.ndim}, need at most 4, broadcastable to {tuple(shape)}")
    added, tensor = 4 - tensor.ndim, rank4_bias(tensor)
    sizes = list(zip(tensor.shape, shape, ("batch", "heads", "queries", "keys"), strict=True))
    for size, want, axis in sizes[added:]:  # a batch that data decide is compared with nothing but itself
        if size != want and size != 1 and not (varlen and axis in ("queries", "keys")):
            raise LayoutError(
                f"bias: {size} along {axis}, the problem has {want}; need 1 or {want} (shape {tuple(bias.shape)})"
            )
    return tensor, None


def alibi_slopes(slopes: Tensor, dtype: torch.dtype, precision: str) -> Tensor:
    """Slopes as (B or 1, H), in the dtype of the arithmetic."""
    wanted = torch.float64 if dtype == torch.float64 or precision in WIDE else torch.float32
    slopes = slopes if slopes.dtype is wanted else slopes.to(wanted)
    return slopes if slopes.ndim == 2 else slopes.unsqueeze(0)


def rank4_bias(bias: Tensor) -> Tensor:
    return bias if bias.ndim == 4 else bias[(None,) * (4 - bias.ndim)]


def int32_lengths(name: str, cu: Tensor) -> Tensor:
    """Cumulative lengths as kernels read them."""
    if cu.dtype is torch.int32:
        return cu
    check_range(name, cu)
    return cu.int()


def _check_floating(name: str, x: Any, device: torch.device, wanted: str) -> Tensor:
    """Raise unless x is a dense tensor of a kind that kernels read, on the device."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentTypeError(f"{name}: got {got}, need a floating-point {wanted}")
    check_dense(name, x)
    if dtype_name(x) not in ITEMSIZE:
        raise ArgumentTypeError(
            f"{name}: dtype {x.dtype}, need float16, bfloat16, float32 or float64; convert with .to(q.dtype)"
        )
    check_device(name, x, device)
    return x


def check_sinks(sinks: Tensor | None, q: Tensor, heads: int) -> Tensor | None:
    if sinks is None:
        return None
    sinks = _check_floating("sinks", sinks, q.device, f"tensor ({heads},)")
    if tuple(sinks.shape) != (heads,):
        raise LayoutError(f"sinks: shape {tuple(sinks.shape)}, need one for each query head, ({heads},)")
    return sinks


def result_inside(name: str, x: Tensor, problem: Problem, layout: str, columns: tuple[int, ...]) -> Tensor:
    """An output (`columns` = (Dv,)) or LSE (()) of the call, brought to (B, Hq, M, …); raises where it cannot be one."""
    want: tuple[int, ...] = (1 if problem.varlen else problem.batch, problem.heads, problem.seqlen_q, *columns)
    inner = x
    if problem.varlen and columns and x.ndim == 3:
        inner = x.transpose(0, 1).unsqueeze(0)
    elif problem.varlen and x.ndim == 2:
        inner = x.unsqueeze(0)
    elif columns and layout == "bshd" and x.ndim == 4:
        inner = x.transpose(1, 2)
    if tuple(inner.shape) != want or not torch.is_floating_point(x):
        raise LayoutError(
            f"{name}: shape {tuple(x.shape)} and dtype {x.dtype}; the result of this call is floating-point and, "
            f"as (batch, heads, queries, …), of shape {want}"
        )
    return inner.detach()
