"""The tiles that `explain` shows are those of the launches, for GPUs that need not be there."""

from __future__ import annotations

import pytest
import torch
from tools.gpu_launches import launches

from tests.diagnostics.explained import drawn, sizes_of
from tilewise.backends.base import Inputs, Needs
from tilewise.diagnostics.explain import explain
from tilewise.hardware import lookup


@pytest.mark.parametrize("device", ["a100", "h200"])
def test_portable_launches_have_the_tiles_that_are_explained(device: str) -> None:
    """200 random problems, forward and backward: all kernels that walk over keys, queries or parts, in order."""
    spec, merged = lookup(device), 0
    for seed in range(200):
        problem = drawn(seed, "triton", spec)
        shape = problem.batch, problem.heads, problem.seqlen_q, problem.head_dim
        q = torch.empty(shape, dtype=getattr(torch, problem.dtype), device="meta")
        k = q.new_empty(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)
        inputs = Inputs(q, k, k)
        found = [launch for needs in (None, Needs()) for _, launch in launches(problem, inputs, spec, needs=needs)]
        shown = [tile for tile in explain(problem, device=device, backend="triton").plan.passes if tile.block_k > 1]
        assert sizes_of(found) == [tile.sizes for tile in shown], (problem, sizes_of(found), shown)
        merged += any(tile.pass_ == "merge" for tile in shown)
    assert merged > 10
