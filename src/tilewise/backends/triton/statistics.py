"""The launches of statistics and of the entropy's gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends.base import (
    BackwardInputs,
    EntropyCotangent,
    Grads,
    Inputs,
    Statistics,
    empty_lse,
    empty_out,
    empty_statistics,
)
from tilewise.backends.gpu.launch import bias_view, view
from tilewise.backends.gpu.record import Launch
from tilewise.backends.triton import plan, run
from tilewise.backends.triton.derive import bias_tiles
from tilewise.backends.triton.derived import sweep_tile
from tilewise.backends.triton.listed import grid
from tilewise.backends.triton.run import (
    arguments,
    fp16_parts,
    options,
    ready,
    run_backward,
    spec_of,
    splitting,
    with_parts,
)
from tilewise.backends.triton.tangents import StatisticsArgs
from tilewise.hardware import DeviceSpec
from tilewise.problem import Problem


def run_statistics(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Statistics]:
    inputs, spec = ready(problem, inputs), spec_of(inputs.q.device)
    out, lse = empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q)
    stats = empty_statistics(problem, lse)
    for launch in statistics_launches(problem, inputs, (out, lse), stats, spec):
        launch.run()
    return out, lse, stats


def statistics_launches(
    problem: Problem, inputs: Inputs, results: tuple[Tensor, Tensor], stats: Statistics, spec: DeviceSpec
) -> Iterator[Launch]:
    """The forward with what rows saw, and the sweeps for what keys received and for the largest weights."""
    from tilewise.backends.triton.stats import mass_kernel, statistics_kernel, top_kernel

    tiles = plan.tiles(problem, spec)
    parts = fp16_parts(problem, inputs[:3])
    for x, y in zip(inputs[:3], parts, strict=False):
        yield splitting(x, y, tiles["fp16_split"], spec)
    tile = tiles["forward"]
    a, config = with_parts(*arguments(problem, inputs, *results, tile), parts)
    args = StatisticsArgs(stats.max_logit, stats.entropy, stats.key_lse)
    _, k, v = parts or inputs[:3]
    maps = run.descriptors(k, v, tile.block_k, run.worth_maps(problem))
    programs = grid(problem, problem.seqlen_q, tile.block_q, problem.heads)
    yield Launch(statistics_kernel, programs, (a, args, *maps), config, options(tile, spec))
    if stats.key_mass is not None:
        tile = sweep_tile(problem, spec, "key_mass")
        a, config = arguments(problem, inputs, *results, tile)
        programs = grid(problem, problem.seqlen_k, tile.block_k, problem.heads)
        args = StatisticsArgs(mass_ptr=stats.key_mass)
        yield Launch(mass_kernel, programs, (a, args), config, options(tile, spec))
    if problem.top:
        tile = sweep_tile(problem, spec, "top")
        a, config = arguments(problem, inputs, *results, tile)
        programs = grid(problem, problem.seqlen_q, tile.block_q, problem.heads)
        args = StatisticsArgs(weights_ptr=stats.weights, indices_ptr=stats.indices)
        yield Launch(top_kernel, programs, (a, args), config._replace(TOP=problem.top), options(tile, spec))


def run_entropy_backward(problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: EntropyCotangent) -> Grads:
    """The gradients through the output and through the entropy, which come from kernels of their own."""
    found = run_backward(replace(problem, stats=()), inputs, given)
    inputs = ready(problem, inputs)
    for launch, into, to in entropy_launches(problem, inputs, given, entropy, spec_of(inputs.q.device)):
        launch.run()
        own = getattr(found, into)
        found = found._replace(**{into: own + to.to(own.dtype)})
    return found


def entropy_launches(
    problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: EntropyCotangent, spec: DeviceSpec
) -> Iterator[tuple[Launch, str, Tensor]]:
    """The launches, the gradient that each is part of, and where it goes."""
    from tilewise.backends.triton.stats import entropy_bias_kernel, entropy_keys_kernel, entropy_queries_kernel

    args = StatisticsArgs(dentropy_ptr=entropy.dentropy.contiguous(), mean_ptr=entropy.mean.contiguous())
    lse = given.lse.contiguous()
    if given.needs.dq:
        tile, dq = sweep_tile(problem, spec, "entropy_dq"), torch.empty_like(inputs.q)
        a, config = arguments(problem, inputs, given.out, lse, tile)
        programs = grid(problem, problem.seqlen_q, tile.block_q, problem.heads)
        own = args._replace(dq=view(dq))
        yield Launch(entropy_queries_kernel, programs, (a, own), config, options(tile, spec)), "dq", dq
    if given.needs.dk:
        tile, dk = sweep_tile(problem, spec, "entropy_dk"), torch.empty_like(inputs.k)
        a, config = arguments(problem, inputs, given.out, lse, tile)
        programs = grid(problem, problem.seqlen_k, tile.block_k, problem.kv_heads)
        own = args._replace(dk=view(dk))
        yield Launch(entropy_keys_kernel, programs, (a, own), config, options(tile, spec)), "dk", dk
    if given.needs.dbias and inputs.bias is not None:
        tile = sweep_tile(problem, spec, "entropy_dbias")
        dbias = torch.zeros(inputs.bias.shape, dtype=torch.float32, device=inputs.bias.device)
        a, config = arguments(problem, inputs, given.out, lse, tile)
        config = config._replace(SUM_M=dbias.shape[2] == 1, SUM_N=dbias.shape[3] == 1)
        own = args._replace(dbias=bias_view(dbias), bias_shape=tuple(dbias.shape))
        yield Launch(entropy_bias_kernel, bias_tiles(dbias, tile), (a, own), config, options(tile, spec)), "dbias", dbias
