"""Which tiles a problem runs with: the planner's, for the live device; small ones in the interpreter."""

from __future__ import annotations

from functools import cache

import torch

from tilewise.backends.gpu.arguments import padded
from tilewise.backends.gpu.launch import interpreting
from tilewise.hardware import DeviceSpec, probe_gpu
from tilewise.planner import TilePlan, gpu_tile
from tilewise.problem import Problem

PACKED_ROWS = 64
"""Up to so many rows (queries × heads of a group) a problem counts as decoding: rows are packed and keys split."""


@cache
def spec_of(index: int) -> DeviceSpec:
    spec = probe_gpu(index)
    assert spec is not None, "a CUDA tensor without a CUDA device"
    return spec


def decoding(problem: Problem) -> bool:
    """Are there so few queries that their heads are packed into one tile?"""
    rows = problem.seqlen_q * problem.group
    return not problem.varlen and rows <= PACKED_ROWS and problem.seqlen_k >= 4 * rows


def tile_for(problem: Problem, pass_: str, device: torch.device) -> TilePlan:
    """The tile of one pass ("forward", "decode", "backward_dkdv", "backward_dq")."""
    if interpreting() and device.type == "cpu":
        return TilePlan(16, 32 if pass_ != "backward_dkdv" else 16, 1, 4, splits=3 if pass_ == "decode" else 1, pack_gqa=pass_ == "decode", pass_=pass_)
    return gpu_tile(problem, spec_of(device.index or 0), pass_)


def bias_tile(problem: Problem) -> TilePlan:
    """The tile of the bias gradient, which holds a tile of dBias and four loaded ones."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v)) * problem.itemsize
    side = 16 if interpreting() else 64 if wide <= 256 else 32 if wide <= 1024 else 16
    return TilePlan(side, side, 1, 4)
