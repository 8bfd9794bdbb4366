"""The launches of JVP and double backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.backends.base import (
    BackwardInputs,
    Direction,
    Grads,
    Inputs,
    Jvp,
    Tangents,
    empty_lse,
    empty_out,
    row_products,
    sink_gradient_tangent,
)
from tilewise.backends.gpu.launch import Descriptor, bias_view, describable, view
from tilewise.backends.gpu.operands import padded
from tilewise.backends.gpu.record import Launch
from tilewise.backends.triton import onchip
from tilewise.backends.triton.listed import grid
from tilewise.backends.triton.plan import derivative_tiles
from tilewise.backends.triton.run import arguments, options, ready, spec_of, worth_maps
from tilewise.backends.triton.tangents import TangentArgs
from tilewise.hardware import DeviceSpec
from tilewise.model import TilePlan
from tilewise.problem import Problem


def tangent_args(tangents: Tangents, out_t: Tensor, lse_t: Tensor) -> TangentArgs:
    q, k, v = (None if x is None else view(x) for x in tangents[:3])
    bias, sinks = tangents.bias, tangents.sinks
    bias_t = None if bias is None else bias_view(bias)
    return TangentArgs(q, k, v, bias_t, None if sinks is None else sinks.contiguous(), view(out_t), lse_t)


def run_jvp(problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
    inputs, spec = ready(problem, inputs), spec_of(inputs.q.device)
    out, lse = empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q)
    result = Jvp(out, lse, torch.empty_like(out), torch.empty_like(lse))
    jvp_launch(problem, inputs, tangents, result, spec).run()
    return result


def jvp_launch(problem: Problem, inputs: Inputs, tangents: Tangents, result: Jvp, spec: DeviceSpec) -> Launch:
    from tilewise.backends.triton.jvp import jvp_kernel

    tile = derivative_tiles(problem, spec, "jvp")["jvp"]
    a, config = arguments(problem, inputs, result.out, result.lse, tile)
    programs = grid(problem, problem.seqlen_q, tile.block_q, problem.heads)
    maps = tensor_maps(problem, (*inputs[1:3], *tangents[1:3]), tile.block_k, spec)
    args = (a, tangent_args(tangents, result.out_t, result.lse_t), *maps)
    return Launch(jvp_kernel, programs, args, config, options(tile, spec))


def tensor_maps(
    problem: Problem, operands: tuple[Tensor | None, ...], rows: int, spec: DeviceSpec
) -> tuple[Descriptor | None, ...]:
    """The tensor maps of streamed operands, None for those that there are not; on devices that have none, and for operands that
    they do not describe, all None."""
    held = [x for x in operands if x is not None]
    fit = onchip.widest(spec) in ("wgmma", "tcgen05") and worth_maps(problem) and all(map(describable, held))
    return tuple(Descriptor.of(x, rows, padded(x.shape[3])) if fit and x is not None else None for x in operands)


def run_double_backward(problem: Problem, inputs: Inputs, given: BackwardInputs, direction: Direction) -> Grads:
    inputs = ready(problem, inputs)
    out, lse, dout, dlse, needs = given
    tangents, out_t, lse_t = direction
    assert out_t is not None and lse_t is not None
    lse, lse_t = lse.contiguous(), lse_t.contiguous()
    delta, delta_t = (row_products(dout, x, lse.dtype) for x in (out, out_t))
    if dlse is not None:
        delta = delta - torch.where(lse == float("-inf"), 0.0, dlse)
    dq, dk, dv = (torch.empty_like(x) for x in inputs[:3])
    bias = inputs.bias if needs.dbias else None
    dbias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    t = tangent_args(tangents, out_t, lse_t)
    t = t._replace(dout=view(dout), delta_ptr=delta, delta_t_ptr=delta_t, dq=view(dq), dk=view(dk), dv=view(dv))
    for launch in second_launches(problem, inputs, given._replace(lse=lse), t, tangents):
        launch.run()
    if dbias is not None:
        second_bias_launch(problem, inputs, given._replace(lse=lse), t, dbias).run()
    sinks = inputs.sinks if needs.dsinks else None
    return Grads(
        dq if needs.dq else None,
        dk if needs.dk else None,
        dv if needs.dv else None,
        None if bias is None or dbias is None else dbias.to(bias.dtype),
        None if sinks is None else sink_gradient_tangent(sinks, tangents.sinks, (lse, lse_t, delta, delta_t)),
    )


def second_launches(
    problem: Problem,
    inputs: Inputs,
    given: BackwardInputs,
    t: TangentArgs,
    tangents: Tangents,
    spec: DeviceSpec | None = None,
) -> Iterator[Launch]:
    """The kernels of the gradients wanted; `spec` is that of the tensors unless another machine is compiled for."""
    from tilewise.backends.triton.double_backward import keys_kernel, queries_kernel

    spec = spec or spec_of(inputs.q.device)
    tiles = derivative_tiles(problem, spec, "double_backward")
    if given.needs.dq:
        tile = tiles["double_backward_dq"]
        a, config = arguments(problem, inputs, given.out, given.lse, tile)
        programs = grid(problem, problem.seqlen_q, tile.block_q, problem.heads)
        maps = tensor_maps(problem, (*inputs[1:3], *tangents[1:3]), tile.block_k, spec)
        yield Launch(queries_kernel, programs, (a, t, *maps), config, options(tile, spec))
    if given.needs.dk or given.needs.dv:
        tile = tiles["double_backward_dkdv"]
        a, config = arguments(problem, inputs, given.out, given.lse, tile)
        programs = grid(problem, problem.seqlen_k, tile.block_k, problem.kv_heads)
        maps = tensor_maps(problem, (inputs.q, tangents.q, given.dout), tile.block_q, spec)
        yield Launch(keys_kernel, programs, (a, t, *maps), config, options(tile, spec))


def second_bias_launch(
    problem: Problem,
    inputs: Inputs,
    given: BackwardInputs,
    t: TangentArgs,
    dbias: Tensor,
    spec: DeviceSpec | None = None,
) -> Launch:
    """The kernel of the bias's gradient, which is summed over what the bias was broadcast to."""
    from tilewise.backends.triton.double_backward import second_bias_kernel

    spec = spec or spec_of(inputs.q.device)
    tile = derivative_tiles(problem, spec, "double_backward")["double_backward_dbias"]
    a, config = arguments(problem, inputs, given.out, given.lse, tile)
    config = config._replace(SUM_M=dbias.shape[2] == 1, SUM_N=dbias.shape[3] == 1)
    t = t._replace(dbias=bias_view(dbias), bias_shape=tuple(dbias.shape), dq=None, dk=None, dv=None)
    return Launch(second_bias_kernel, bias_tiles(dbias, tile), (a, t), config, options(tile, spec))


def bias_tiles(dbias: Tensor, tile: TilePlan) -> int:
    """Programs of a kernel over the bias's own tiles."""
    b, h, m, n = dbias.shape
    return b * h * -(-m // tile.block_q) * -(-n // tile.block_k)
