"""Which tiles a problem runs with: the planner's, for the live device; small ones in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch

from tilewise.backends.gpu.arguments import padded
from tilewise.backends.gpu.launch import interpreting
from tilewise.hardware import DeviceSpec, probe_gpu
from tilewise.model import TilePlan, gpu_tile
from tilewise.problem import Problem


@cache
def spec_of(index: int) -> DeviceSpec:
    spec = probe_gpu(index)
    assert spec is not None, "a CUDA tensor without a CUDA device"
    return spec


def tile_for(problem: Problem, pass_: str, device: torch.device) -> TilePlan:
    """The tile of one pass ("forward", "decode", "backward_dkdv", "backward_dq")."""
    if interpreting() and device.type == "cpu":
        tile = TilePlan(16 if pass_ == "decode" else 32, 32, 1, 4, pass_=pass_)
        return replace(tile, splits=3 if problem.bias is None else 1, pack_gqa=True) if pass_ == "decode" else tile
    return gpu_tile(problem, spec_of(device.index or 0), pass_, "triton")


def smaller(tile: TilePlan) -> Iterator[TilePlan]:
    """Tiles that need less and less memory: fewer stages, then shorter blocks."""
    for stages in range(tile.stages - 1, 0, -1):
        yield replace(tile, stages=stages)
    while max(tile.block_q, tile.block_k) > 16:
        if tile.block_k >= tile.block_q:
            tile = replace(tile, block_k=tile.block_k // 2, stages=1)
        else:
            tile = replace(tile, block_q=tile.block_q // 2, stages=1)
        yield replace(tile, warps=4)


def bias_tile(problem: Problem) -> TilePlan:
    """The tile of the bias gradient, which holds a tile of dBias and four loaded ones."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v)) * problem.itemsize
    side = 16 if interpreting() else 64 if wide <= 256 else 32 if wide <= 1024 else 16
    return TilePlan(side, side, 1, 4)
