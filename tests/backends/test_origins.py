"""Absolute origins: a part of a problem is computed with the weights and the dropout that the whole has there."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.backends.origins import excesses, part
from tests.backends.test_triton_interpreter import interpret
from tests.interpreter import needs_interpreter
from tilewise import dispatch
from tilewise.backends.base import Inputs
from tilewise.masks import full
from tilewise.numerics.merge import merge_many
from tilewise.numerics.oracle import oracle
from tilewise.numerics.philox import keep_tile
from tilewise.ops.tensors import tensor_fields
from tilewise.problem import Problem

HEADS, LENGTH, CUTS = 3, 29, (0, 6, 13, 29)


def whole() -> tuple[Problem, Inputs]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((2, HEADS, LENGTH, 8), generator=g, dtype=torch.float64) for _ in range(3))
    inputs = Inputs(q, k, v, alibi=torch.rand((1, HEADS), generator=g, dtype=torch.float64), seed=torch.tensor(5))
    return Problem(**tensor_fields(inputs), mask=full(), scale=0.3, dropout_p=0.5), inputs


def test_parts_in_the_oracle_make_up_the_whole() -> None:
    problem, inputs = whole()
    want_out, want_lse = oracle(problem, inputs)
    assert inputs.alibi is not None
    for q0, q1 in pairwise(CUTS):
        parts = []
        for k0, k1 in pairwise(CUTS):
            origins = torch.tensor([[q0, k0, 1, b] for b in range(2)], dtype=torch.int32)
            own = inputs._replace(
                q=inputs.q[:, 1:, q0:q1], k=inputs.k[:, 1:, k0:k1], v=inputs.v[:, 1:, k0:k1],
                alibi=inputs.alibi[:, 1:], origins=origins,
            )  # fmt: skip
            parts.append(oracle(replace(problem, **tensor_fields(own)), own))
        out, lse = merge_many(*zip(*parts, strict=True))
        torch.testing.assert_close(out, want_out[:, 1:, q0:q1])
        torch.testing.assert_close(lse, want_lse[:, 1:, q0:q1])


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_parts_are_within_the_bounds_of_the_oracle(backend: str, packed: bool) -> None:
    assert not excesses(backend, packed)


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_the_dropout_of_a_part_is_bitwise_that_of_the_whole(backend: str) -> None:
    """With q = 0 every weight is 1/n, and values that are unit vectors show which were kept."""
    problem, inputs = part(packed=False)
    keys = inputs.k.shape[2]
    eye = torch.eye(keys).expand(4, 2, keys, keys)
    inputs = inputs._replace(q=torch.zeros_like(inputs.q), v=eye, alibi=None)
    problem = replace(problem, **tensor_fields(inputs))
    out, _ = dispatch.get(backend).forward(problem, inputs)
    assert inputs.origins is not None and inputs.seed is not None
    for b, (q, k, head, batch) in enumerate(inputs.origins.tolist()):
        ranges = (range(batch, batch + 1), range(head, head + 4), range(q, q + 17), range(k, k + keys))
        assert torch.equal(out[b : b + 1] > 0, keep_tile(inputs.seed, 0.4, *ranges))


def test_a_call_without_dropout_and_alibi_compiles_the_same_kernel() -> None:
    from tilewise.backends.cpu import plan
    from tilewise.hardware.probe import probe_cpu

    problem, _ = part(packed=False)
    plain = replace(problem, dropout_p=0.0, alibi=False)
    spec = probe_cpu(1)
    kernels = [
        plan.kernel_for(one, plan.tile_for(one, spec, "forward"), spec) for one in (plain, replace(plain, origins=False))
    ]
    assert kernels[0] == kernels[1]


@needs_interpreter
def test_parts_in_tritons_interpreter() -> None:
    interpret("tests.backends.origins", "triton")
