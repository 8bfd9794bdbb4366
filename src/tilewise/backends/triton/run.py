"""The kernels of a forward and of a backward, in order, each with its tile, arguments and grid."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Grads, Inputs, sink_gradient
from tilewise.backends.gpu import arguments as host
from tilewise.backends.gpu.compiled import is_collecting
from tilewise.backends.gpu.launch import (
    Descriptor,
    LaunchOptions,
    bias_view,
    describable,
    interpreting,
    on_hip,
    takes_early,
    view,
)
from tilewise.backends.gpu.lists import memory_pattern, walks_lists
from tilewise.backends.gpu.operands import dot_precision, padded, splits_fp32
from tilewise.backends.gpu.record import Launch, recorder
from tilewise.backends.gpu.structs import Attention, Fp16Split, Gradients, KernelConfig, MaskArgs, MaskLayout
from tilewise.backends.triton import onchip, plan, tune
from tilewise.backends.triton.fixed import pieces
from tilewise.backends.triton.listed import CallMask, and_careful, call_mask, grid, with_lists
from tilewise.hardware import DeviceSpec, probe_cpu, probe_gpu
from tilewise.model import TilePlan
from tilewise.problem import Problem

MAPS_FROM = 1 << 30
"""Multiply-adds of QKᵀ, about 10 µs of an H200."""
Build = Callable[[TilePlan], Launch]


@cache
def spec_of(device: torch.device) -> DeviceSpec:
    """The machine a tensor is on. In the interpreter that is the CPU."""
    spec = probe_gpu(device.index or 0) if device.type == "cuda" else probe_cpu()
    assert spec is not None, "a CUDA tensor without a CUDA device"
    return spec


def options(tile: TilePlan, spec: DeviceSpec) -> LaunchOptions:
    return LaunchOptions(tile.warps, onchip.num_stages(tile, spec) if spec.is_gpu else tile.stages)


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


def key_of(problem: Problem, inputs: Inputs, *rest: Hashable) -> Hashable:
    """What the launches of a call depend on beside the problem; of its mask's tensors, and of lists, on the shapes."""
    shapes: Hashable = ()
    if problem.program.tensors:
        shapes = problem.memory.get("shapes")
        if shapes is None:
            tensors = problem.program.tensors
            shapes = tuple([tuple(x.shape) for x in tensors]), memory_pattern(tensors)
            problem.memory["shapes"] = shapes
    q, k, v, bias, alibi, sinks, seed = inputs[:7]
    plain = bias is None and alibi is None and sinks is None and seed is None
    others = () if plain else tuple(None if x is None else (x.stride(), x.dtype) for x in (bias, alibi, sinks, seed))
    return "triton", q.device, q.stride(), k.stride(), v.stride(), others, shapes, *rest


def fp16_parts(problem: Problem, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Fresh memory for the fp16 parts of fp32 operands that are to be split; () where they are not."""
    if not splits_fp32(problem, on_hip()):
        return ()
    return tuple(host.empty_fp16_split(x) for x in operands)


def with_parts(a: Attention, config: KernelConfig, parts: tuple[Tensor, ...]) -> tuple[Attention, KernelConfig]:
    """Arguments and config with q, k and v in fp16 parts, if there are any."""
    if not parts:
        return a, config
    q, k, v = (host.split_view(x) for x in parts[:3])
    return a._replace(q=q, k=k, v=v), config._replace(FP16_SPLIT=True)


def splitting(x: Tensor, parts: Tensor, tile: TilePlan, spec: DeviceSpec) -> Launch:
    """The launch that splits an fp32 tensor into fp16 parts."""
    from tilewise.backends.triton.fp16_split import fp16_split_kernel

    b, h, length, d = x.shape
    config = KernelConfig(BLOCK_M=tile.block_q, BLOCK_N=tile.block_k, D=d, BLOCK_D=padded(d), INTERPRET=interpreting())
    args = (Fp16Split(view(x), host.split_view(parts), b, h, length),)
    return Launch(fp16_split_kernel, -(-length // tile.block_q) * h * b, args, config, options(tile, spec))


def run_forward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    """Fill out and lse."""
    inputs = ready(problem, inputs)
    spec = spec_of(out.device)
    recording = recorder.get(problem, key_of(problem, inputs), out.device, partial(forward_tiles, problem, spec))
    tiles: dict[str, TilePlan] = recording.plan
    partials = host.partial_results(out, out.shape, tiles["decode"].splits) if "merge" in tiles else ()
    parts = fp16_parts(problem, inputs[:3]) if "forward" in tiles else ()
    mask = call_mask(problem, inputs, tiles)
    tensors = (*inputs, out, lse, *partials, *parts, *mask.tensors, *mask.flags)
    if not recording.repeat(tensors):
        recording.record(tensors, forward_launches(problem, inputs, (out, lse), partials, parts, tiles, mask))


def forward_tiles(problem: Problem, spec: DeviceSpec) -> dict[str, TilePlan]:
    """What the plan has for a forward."""
    return {pass_: tile for pass_, tile in plan.tiles(problem, spec).items() if not pass_.startswith("backward")}


def forward_launches(
    problem: Problem,
    inputs: Inputs,
    results: tuple[Tensor, Tensor],
    partials: tuple[Tensor, ...],
    parts: tuple[Tensor, ...],
    tiles: dict[str, TilePlan],
    mask: CallMask,
) -> list[Launch]:
    """fp32 operands are split first; the partial results of split-KV are merged last."""
    out, lse = results
    from tilewise.backends.triton.forward import forward_kernel
    from tilewise.backends.triton.split import merge_kernel

    spec = spec_of(out.device)
    maps = "forward" in tiles and worth_maps(problem)

    def forward(tile: TilePlan) -> Launch:
        a, config = with_parts(*arguments(problem, inputs, out, lse, tile, mask), parts)
        rows, heads = problem.seqlen_q, problem.heads
        if tile.pack_gqa:
            config = config._replace(PACK=problem.group)
            rows, heads = rows * problem.group, problem.kv_heads
        programs = grid(problem, rows, tile.block_q, heads) * tile.splits
        if partials:
            a = a._replace(out=host.split_view(partials[0]), lse_ptr=partials[1])
            config = config._replace(SPLIT=True, EARLY=merges_early(spec))
        _, k, v = parts or inputs[:3]
        args = (a, *descriptors(k, v, tile.block_k, maps))
        return Launch(forward_kernel, programs, args, config, options(tile, spec))

    launches = [splitting(x, y, tiles["fp16_split"], spec) for x, y in zip(inputs[:3], parts, strict=False)]
    launches += and_careful(planned(problem, tiles["forward" if "forward" in tiles else "decode"], forward, spec))
    if "merge" in tiles:
        tile = tiles["merge"]
        a, config = arguments(problem, inputs, out, lse, replace(tile, splits=tiles["decode"].splits), mask)
        programs = -(-problem.seqlen_q // tile.block_q) * out.shape[0] * problem.heads
        args, config = (a, host.split_view(partials[0]), partials[1]), in_pieces(config, tile)._replace(MASK=MaskLayout())
        launches.append(merging(Launch(merge_kernel, programs * pieces(tile), args, config, options(tile, spec)), spec))
    return launches


def run_backward(problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
    """The gradients asked for."""
    inputs = ready(problem, inputs)
    out, lse, dout, dlse, needs = given
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()  # parts of the queries lie within more of them
    dq, dk, dv = (torch.empty_like(x) if wanted else None for x, wanted in zip(inputs[:3], needs[:3], strict=True))
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    whole = (*inputs[:3], dout)
    parts = fp16_parts(problem, whole)
    spec = spec_of(out.device)
    key = key_of(problem, inputs, out.stride(), dout.stride(), dlse is None, needs)
    recording = recorder.get(problem, key, out.device, partial(plan.tiles, problem, spec))
    wanted = ["backward_dkdv"] * (needs.dk or needs.dv) + ["backward_dq"] * needs.dq
    mask = call_mask(problem, inputs, {pass_: tile for pass_, tile in recording.plan.items() if pass_ in wanted})

    def gradients() -> Gradients:
        to_dq, to_dk, to_dv = (None if x is None else view(x) for x in (dq, dk, dv))
        return Gradients(view(dout), to_dq, to_dk, to_dv, lse2, delta, dlse, dbias=None, bias_shape=None)

    def build(tiles: dict[str, TilePlan]) -> list[Launch]:
        g = gradients()
        maps = worth_maps(problem)
        from tilewise.backends.triton.backward import keys_kernel, prepare_kernel, queries_kernel

        q, k, v, do = parts or whole
        split_g = g._replace(dout=host.split_view(do)) if parts else g

        def keys(tile: TilePlan, only: str = "") -> Launch:
            a, config = with_parts(*arguments(problem, inputs, out, lse, tile, mask), parts)
            programs = grid(problem, problem.seqlen_k, tile.block_k, problem.kv_heads)
            into = split_g._replace(dq=None, dk=None if only == "dv" else g.dk, dv=None if only == "dk" else g.dv)
            streamed = descriptors(q, do, tile.block_q, maps)
            # with fp32 in two parts, or features, there are no registers for dP before dV
            plain = config.LISTED and config.FOLD and not (config.FP16_SPLIT or config.DROPOUT)
            mapped = plain and streamed[0] is not None and aligned_rows(problem)
            args = (a, into, *streamed, *row_maps(lse2, delta, tile, spec, mapped))
            return Launch(keys_kernel, programs, args, config, options(tile, spec))

        def queries(tile: TilePlan) -> Launch:
            a, config = with_parts(*arguments(problem, inputs, out, lse, tile, mask), parts)
            programs = grid(problem, problem.seqlen_q, tile.block_q, problem.heads)
            args = (a, split_g._replace(dk=None, dv=None), *descriptors(k, v, tile.block_k, maps))
            return Launch(queries_kernel, programs, args, config, options(tile, spec))

        tile = tiles["backward_preprocess"]
        a, config = arguments(problem, inputs, out, lse, tile, mask)
        a = a._replace(mask=MaskArgs((), (), ()))
        plain = config._replace(MASK=MaskLayout(), DROPOUT=False, SOFTCAP=False, FOLD=True)
        programs = -(-problem.seqlen_q // tile.block_q) * problem.heads * out.shape[0]
        launches = [Launch(prepare_kernel, programs, (a, g), plain, options(tile, spec))]
        launches += [splitting(x, y, tiles["fp16_split"], spec) for x, y in zip(whole, parts, strict=False)]
        together = needs.dk and needs.dv and not plan.apart(problem, spec)
        for only in ("",) if together else [name for name, wanted in (("dk", needs.dk), ("dv", needs.dv)) if wanted]:
            launches += and_careful(planned(problem, tiles["backward_dkdv"], partial(keys, only=only), spec))
        if needs.dq:
            launches += and_careful(planned(problem, tiles["backward_dq"], queries, spec))
        return launches

    tensors = (*inputs, out, lse, dout, dlse, dq, dk, dv, lse2, delta, *parts, *mask.tensors, *mask.flags)
    if not recording.repeat(tensors):
        recording.record(tensors, build(recording.plan))
    return Grads(
        dq,
        dk,
        dv,
        bias_gradient(problem, inputs, given._replace(lse=lse), gradients()) if needs.dbias and inputs.bias is not None else None,
        sink_gradient(inputs.sinks, lse, delta) if needs.dsinks and inputs.sinks is not None else None,
    )


def bias_gradient(problem: Problem, inputs: Inputs, given: BackwardInputs, g: Gradients) -> Tensor:
    """dBias, summed over what the bias was broadcast to."""
    from tilewise.backends.triton.bias import bias_kernel

    bias = inputs.bias
    assert bias is not None
    spec = spec_of(bias.device)
    tile = plan.tile(problem, spec, "backward_dbias")
    dbias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    a, config = arguments(problem, inputs, given.out, given.lse, tile)
    config = config._replace(SUM_M=bias.shape[2] == 1, SUM_N=bias.shape[3] == 1)
    g = g._replace(dbias=bias_view(dbias), bias_shape=tuple(bias.shape), dq=None, dk=None, dv=None)
    programs = bias.shape[0] * bias.shape[1] * -(-bias.shape[2] // tile.block_q) * -(-bias.shape[3] // tile.block_k)
    Launch(bias_kernel, programs, (a, g), config, options(tile, spec)).run()
    return dbias.to(bias.dtype)


def planned(problem: Problem, tile: TilePlan, build: Build, spec: DeviceSpec) -> Launch:
    """The launch with the planned tile. Where tuning was asked for and nothing is known yet, candidates are measured first, and
    the fastest is what the plan says from now on."""
    if interpreting() or is_collecting() or not tune.tuning() or tile.source == "user" or walks_lists(problem):
        return build(tile)
    if tune.winner(problem, tile.pass_, spec) is None:
        candidates = plan.choices(problem, spec, tile.pass_)[: tune.CANDIDATES + 1]
        tune.measure(problem, tile.pass_, spec, candidates, lambda candidate: tune.seconds_of(build(candidate)))
    return build(plan.tile(problem, spec, tile.pass_))


def arguments(
    problem: Problem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    tile: TilePlan,
    mask: CallMask | None = None,
) -> tuple[Attention, KernelConfig]:
    """Without the mask of a call, the mask's tensors are converted here."""
    a = host.attention_args(problem, inputs, out, lse, tile.splits, None if mask is None else mask.args)
    config = host.config_for(problem, inputs, dot_precision(problem, on_hip()))
    config = config._replace(BLOCK_M=tile.block_q, BLOCK_N=tile.block_k)
    return (a, config) if mask is None else with_lists(a, config, tile, mask)


def merges_early(spec: DeviceSpec) -> bool:
    """Is the kernel that merges launched before those whose results it waits for have ended?"""
    return takes_early(spec.capability)


def merging(launch: Launch, spec: DeviceSpec) -> Launch:
    """The launch of a kernel that merges."""
    if launch.options is None or not merges_early(spec):
        return launch
    return launch._replace(config=launch.config._replace(EARLY=True), options=launch.options._replace(early=True))


def in_pieces(config: KernelConfig, tile: TilePlan) -> KernelConfig:
    """The merge's config: a program has some of a row's columns."""
    return config._replace(BLOCK_DV=config.BLOCK_DV // pieces(tile))


def worth_maps(problem: Problem) -> bool:
    """Tensor maps make long streams faster, but take the host some microseconds to write."""
    return problem.heads * problem.batch * problem.seqlen_q * problem.seqlen_k * problem.head_dim >= MAPS_FROM


def aligned_rows(problem: Problem) -> bool:
    """Do the statistics of every tile begin at a multiple of 16 bytes? Reading a tensor map of rank 1 from anywhere else is an
    illegal instruction. Where the sequences of a packed batch begin, nobody knows here."""
    return not problem.varlen and problem.seqlen_q % 4 == 0


def row_maps(
    lse2: Tensor, delta: Tensor, tile: TilePlan, spec: DeviceSpec, wanted: bool
) -> tuple[Descriptor | None, Descriptor | None]:
    """Tensor maps of the statistics of all rows, one after another, for the columns of a wgmma."""
    if not wanted or onchip.instruction(tile, spec) != "wgmma" or lse2.numel() >= 1 << 31:
        return None, None
    first, second = (Descriptor(x, [x.numel()], [1], [tile.block_q]) for x in (lse2, delta))
    return first, second


def descriptors(x: Tensor, y: Tensor, rows: int, wanted: bool) -> tuple[Descriptor | None, Descriptor | None]:
    """Tensor maps of two streamed operands where they are wanted, on devices that have them, for tensors they describe."""
    if not wanted or x.device.type != "cuda" or on_hip():
        return None, None
    if torch.cuda.get_device_capability(x.device) < (9, 0):
        return None, None
    if not (describable(x) and describable(y)) or max(x.shape[3], y.shape[3]) > 256:
        return None, None
    return Descriptor.of(x, rows, padded(x.shape[3])), Descriptor.of(y, rows, padded(y.shape[3]))
