"""The kernels of a forward and of a backward, in order, each with its tile, arguments and grid."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Grads, Inputs, sink_gradient
from tilewise.backends.gpu import arguments as host
from tilewise.backends.gpu.launch import Descriptor, LaunchOptions, bias_view, describable, interpreting, on_hip, view
from tilewise.backends.gpu.record import Launch, recorder
from tilewise.backends.gpu.structs import Attention, Fp16Split, Gradients, KernelConfig, MaskLayout
from tilewise.backends.triton.plan import bias_tile, smaller, spec_of, tile_for
from tilewise.backends.triton.tune import best_tile, seconds_of, tuning
from tilewise.errors import KernelError, PlanError
from tilewise.model import TilePlan
from tilewise.problem import Problem


class Trial(NamedTuple):
    """Choices that stand in for the planner's, to measure them."""

    tiles: tuple[TilePlan, ...] = ()
    maps: bool | None = None
    apart: bool | None = None  # dK and dV, each in a kernel of its own

    def tile(self, pass_: str) -> TilePlan | None:
        return next((tile for tile in self.tiles if tile.pass_ == pass_), None)


PLANNED = Trial()
MAPS_FROM = 1 << 30
"""Multiply-adds of QKᵀ, about 10 µs of an H200."""
TOGETHER_UP_TO = 64
"""At larger head dims dK and dV of fp32 are computed apart, five products where together they take four: two accumulators and the
sum of a tile do not fit the registers."""


def ready(problem: Problem, inputs: Inputs) -> Inputs:
    """The inputs as kernels read them; nothing is copied that fits already."""
    if inputs.bias is None and inputs.alibi is None and inputs.sinks is None and inputs.seed is None:
        return inputs
    alibi, sinks, seed = inputs.alibi, inputs.sinks, inputs.seed if problem.dropout_p > 0 else None
    return inputs._replace(
        alibi=None if alibi is None else alibi.to(torch.float32),
        sinks=None if sinks is None else sinks.contiguous(),
        seed=None if seed is None else seed.to(inputs.q.device, non_blocking=True),
    )


def key_of(problem: Problem, inputs: Inputs, *rest: Hashable) -> Hashable | None:
    """What the launches of a call depend on beside the problem; None where the mask has tensors, which are converted first."""
    if problem.program.tensors:
        return None
    q, k, v, bias, alibi, sinks, seed = inputs[:7]
    plain = bias is None and alibi is None and sinks is None and seed is None
    others = () if plain else tuple(None if x is None else (x.stride(), x.dtype) for x in (bias, alibi, sinks, seed))
    return "triton", q.device, q.stride(), k.stride(), v.stride(), others, *rest


def fp16_parts(problem: Problem, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Fresh memory for the fp16 parts of fp32 operands that are to be split; () where they are not."""
    if problem.dtype != "float32" or not host.splits_fp32(problem, on_hip()):
        return ()
    return tuple(host.empty_fp16_split(x) for x in operands)


def with_parts(a: Attention, config: KernelConfig, parts: tuple[Tensor, ...]) -> tuple[Attention, KernelConfig]:
    """Arguments and config with q, k and v in fp16 parts, if there are any."""
    if not parts:
        return a, config
    q, k, v = (host.split_view(x) for x in parts[:3])
    return a._replace(q=q, k=k, v=v), config._replace(FP16_SPLIT=True)


def splitting(x: Tensor, parts: Tensor) -> Launch:
    """The launch that splits an fp32 tensor into fp16 parts."""
    from tilewise.backends.triton.fp16_split import fp16_split_kernel

    b, h, length, d = x.shape
    rows = 32
    config = KernelConfig(BLOCK_M=rows, D=d, BLOCK_D=host.padded(d), INTERPRET=interpreting())
    args = (Fp16Split(view(x), host.split_view(parts), b, h, length),)
    return Launch(fp16_split_kernel, -(-length // rows) * h * b, args, config, LaunchOptions(4, 1))


def run_forward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, trial: Trial = PLANNED) -> None:
    """Fill out and lse."""
    inputs = ready(problem, inputs)
    key = key_of(problem, inputs, trial)
    recording = recorder.get(problem, key, out.device, partial(decode_tile, problem, trial, out.device))
    tile = recording.plan  # None unless decoding
    partials = host.partial_results(out, tile.splits) if tile is not None and tile.splits > 1 else ()
    parts = () if tile is not None else fp16_parts(problem, inputs[:3])
    tensors = (*inputs, out, lse, *partials, *parts)
    if not recording.repeat(tensors):
        recording.record(tensors, forward_launches(problem, inputs, out, lse, partials, parts, tile, trial))


def decode_tile(problem: Problem, trial: Trial, device: torch.device) -> TilePlan | None:
    """The tile of a problem with so few queries that keys are split; None for others."""
    return trial.tile("decode") or tile_for(problem, "decode", device) if problem.decodes else None


def forward_launches(
    problem: Problem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    partials: tuple[Tensor, ...],
    parts: tuple[Tensor, ...],
    decode: TilePlan | None,
    trial: Trial,
) -> list[Launch]:
    """fp32 operands are split first; the partial results of split-KV are merged last."""
    from tilewise.backends.triton.forward import forward_kernel
    from tilewise.backends.triton.split import merge_kernel

    maps = decode is None and worth_maps(problem) if trial.maps is None else trial.maps

    def forward(tile: TilePlan) -> Launch:
        a, config = with_parts(*arguments(problem, inputs, out, lse, tile), parts)
        rows, heads = problem.seqlen_q, problem.heads
        if tile.pack_gqa:
            config = config._replace(PACK=problem.group)
            rows, heads = rows * problem.group, problem.kv_heads
        programs = grid(problem, rows, tile.block_q, heads) * tile.splits
        if partials:
            a = a._replace(out=host.split_view(partials[0]), lse_ptr=partials[1])
            config = config._replace(SPLIT=True)
        _, k, v = parts or inputs[:3]
        args = (a, *descriptors(k, v, tile.block_k, maps))
        return Launch(forward_kernel, programs, args, config, LaunchOptions(tile.warps, tile.stages))

    pass_ = "forward" if decode is None else "decode"
    launches = [splitting(x, y) for x, y in zip(inputs[:3], parts, strict=False)]
    launches.append(fitting(problem, pass_, forward, decode or trial.tile(pass_), out.device))
    if decode is not None and partials:
        rows = min(16, 1 << (problem.seqlen_q - 1).bit_length())
        a, config = arguments(problem, inputs, out, lse, TilePlan(rows, 16, splits=decode.splits))
        programs = -(-problem.seqlen_q // rows) * out.shape[0] * problem.heads
        args, config = (a, host.split_view(partials[0]), partials[1]), config._replace(MASK=MaskLayout())
        launches.append(Launch(merge_kernel, programs, args, config, LaunchOptions(4, 1)))
    return launches


def run_backward(problem: Problem, inputs: Inputs, given: BackwardInputs, trial: Trial = PLANNED) -> Grads:
    """The gradients asked for."""
    inputs = ready(problem, inputs)
    out, lse, dout, dlse, needs = given
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = (torch.empty_like(x) if wanted else None for x, wanted in zip(inputs[:3], needs[:3], strict=True))
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    whole = (*inputs[:3], dout)
    parts = fp16_parts(problem, whole)

    def gradients() -> Gradients:
        to_dq, to_dk, to_dv = (None if x is None else view(x) for x in (dq, dk, dv))
        return Gradients(view(dout), to_dq, to_dk, to_dv, lse2, delta, dlse, dbias=None, bias_shape=None)

    def build() -> list[Launch]:
        g = gradients()
        maps = worth_maps(problem) if trial.maps is None else trial.maps
        from tilewise.backends.triton.backward import keys_kernel, prepare_kernel, queries_kernel

        q, k, v, do = parts or whole
        split_g = g._replace(dout=host.split_view(do)) if parts else g

        def keys(tile: TilePlan, only: str = "") -> Launch:
            a, config = with_parts(*arguments(problem, inputs, out, lse, tile), parts)
            programs = grid(problem, problem.seqlen_k, tile.block_k, problem.kv_heads)
            into = split_g._replace(dq=None, dk=None if only == "dv" else g.dk, dv=None if only == "dk" else g.dv)
            args = (a, into, *descriptors(q, do, tile.block_q, maps))
            return Launch(keys_kernel, programs, args, config, LaunchOptions(tile.warps, tile.stages))

        def queries(tile: TilePlan) -> Launch:
            a, config = with_parts(*arguments(problem, inputs, out, lse, tile), parts)
            programs = grid(problem, problem.seqlen_q, tile.block_q, problem.heads)
            args = (a, split_g._replace(dk=None, dv=None), *descriptors(k, v, tile.block_k, maps))
            return Launch(queries_kernel, programs, args, config, LaunchOptions(tile.warps, tile.stages))

        rows = 16 if interpreting() else 64
        a, config = arguments(problem, inputs, out, lse, TilePlan(rows, 16, 1, 4))
        plain = config._replace(MASK=MaskLayout(), DROPOUT=False, SOFTCAP=False, FOLD=True)
        programs = -(-problem.seqlen_q // rows) * problem.heads * out.shape[0]
        launches = [Launch(prepare_kernel, programs, (a, g), plain, LaunchOptions(4, 1))]
        launches += [splitting(x, y) for x, y in zip(whole, parts, strict=False)]
        apart = worth_parting(problem, bool(parts)) if trial.apart is None else trial.apart
        for only in ("dk", "dv") if apart and needs.dk and needs.dv else ("",) if needs.dk or needs.dv else ():
            build_keys = partial(keys, only=only)
            launches.append(fitting(problem, "backward_dkdv", build_keys, trial.tile("backward_dkdv"), out.device))
        if needs.dq:
            launches.append(fitting(problem, "backward_dq", queries, trial.tile("backward_dq"), out.device))
        return launches

    key = key_of(problem, inputs, out.stride(), dout.stride(), dlse is None, needs, trial)
    recording = recorder.get(problem, key, out.device, type(None))
    tensors = (*inputs, out, lse, dout, dlse, dq, dk, dv, lse2, delta, *parts)
    if not recording.repeat(tensors):
        recording.record(tensors, build())
    return Grads(
        dq,
        dk,
        dv,
        bias_gradient(problem, inputs, given, gradients()) if needs.dbias and inputs.bias is not None else None,
        sink_gradient(inputs.sinks, lse, delta) if needs.dsinks and inputs.sinks is not None else None,
    )


def bias_gradient(problem: Problem, inputs: Inputs, given: BackwardInputs, g: Gradients) -> Tensor:
    """dBias, summed over what the bias was broadcast to."""
    from tilewise.backends.triton.bias import bias_kernel

    bias = inputs.bias
    assert bias is not None
    tile = bias_tile(problem)
    dbias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    a, config = arguments(problem, inputs, given.out, given.lse, tile)
    config = config._replace(SUM_M=bias.shape[2] == 1, SUM_N=bias.shape[3] == 1)
    g = g._replace(dbias=bias_view(dbias), bias_shape=tuple(bias.shape), dq=None, dk=None, dv=None)
    programs = bias.shape[0] * bias.shape[1] * -(-bias.shape[2] // tile.block_q) * -(-bias.shape[3] // tile.block_k)
    Launch(bias_kernel, programs, (a, g), config, LaunchOptions(tile.warps, tile.stages)).run()
    return dbias.to(bias.dtype)


def fitting(
    problem: Problem, pass_: str, build: Callable[[TilePlan], Launch], tile: TilePlan | None, device: torch.device
) -> Launch:
    """A launch with the given tile or the planner's; should that not fit the device after all, with a smaller one."""
    planned = tile or tile_for(problem, pass_, device)
    if interpreting():
        return build(planned)
    from triton.runtime.errors import OutOfResources

    if tile is None and tuning():
        planned = best_tile(problem, pass_, spec_of(device.index or 0), planned, lambda t: seconds_of(build(t)))
    failure = None
    for trial in (planned, *smaller(planned)):
        launch = build(trial)
        try:
            launch.compiled()
        except OutOfResources:
            continue
        except KernelError as error:  # a smaller one may compile
            failure = error
            continue
        return launch
    if failure is not None:
        raise failure
    raise PlanError(
        f"tile: no tile down to 16×16 fits {torch.cuda.get_device_name(device)} for {problem}; use backend='tiled'"
    )


def arguments(
    problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, tile: TilePlan
) -> tuple[Attention, KernelConfig]:
    a = host.attention_args(problem, inputs, out, lse, tile.splits)
    config = host.config_for(problem, inputs, host.dot_precision(problem, on_hip()))
    return a, config._replace(BLOCK_M=tile.block_q, BLOCK_N=tile.block_k)


def worth_parting(problem: Problem, split: bool) -> bool:
    """Where dK, dV and the sum of a tile do not fit the registers together, two kernels are faster than one."""
    return split and max(problem.head_dim, problem.head_dim_v) > TOGETHER_UP_TO


def worth_maps(problem: Problem) -> bool:
    """Tensor maps make long streams faster, but take the host some microseconds to write."""
    return problem.heads * problem.batch * problem.seqlen_q * problem.seqlen_k * problem.head_dim >= MAPS_FROM


def descriptors(x: Tensor, y: Tensor, rows: int, wanted: bool) -> tuple[Descriptor | None, Descriptor | None]:
    """Tensor maps of two streamed operands where they are wanted, on devices that have them, for tensors they describe."""
    if not wanted or x.device.type != "cuda" or on_hip():
        return None, None
    if torch.cuda.get_device_capability(x.device) < (9, 0):
        return None, None
    if not (describable(x) and describable(y)) or max(x.shape[3], y.shape[3]) > 256:
        return None, None
    return Descriptor.of(x, rows, host.padded(x.shape[3])), Descriptor.of(y, rows, host.padded(y.shape[3]))


def grid(problem: Problem, rows: int, block: int, heads: int) -> int:
    """Programs for all tiles of all heads; for packed sequences an upper bound that needs no lengths."""
    if problem.varlen:
        return (rows // block + problem.batch) * heads
    return -(-rows // block) * heads * problem.batch
