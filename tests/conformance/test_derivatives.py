"""JVP and double backward of every conformance case, each backend by name, held to the fp64 oracle by derived bounds."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from tests.conformance.cases import BY_NAME, CASES, Case, build
from tests.numerics.second import derivatives
from tilewise import dispatch
from tilewise.backends.base import DERIVATIVES
from tilewise.backends.cpu import frames
from tilewise.ops.run import is_empty

TILE = (("double_backward", 16, 32), ("jvp", 16, 32))
SMALL = [case for case in CASES if max(case.seqlen, case.kv_seqlen or 0) <= 90 and case.head_dim <= 64]
SMALL = [case for case in SMALL if "edge" not in case.name or case.name.endswith(("-1", "-17", "-65"))]

COMPILED = {
    *("plain", "dtype-bfloat16", "softcap-bias", "alibi-batch-cross", "sinks-empty-rows", "dropout-gqa-causal", "huge-logits"),
    *("varlen-cross", "mask-documents", "more-queries-causal", "value-dim-larger"),
}
"""Cases that the compiled kernels run; all of them with TILEWISE_FUZZ, since each takes two compilations."""


@pytest.mark.parametrize("backend", ["tiled", "cpu"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_derivatives(case: Case, backend: str) -> None:
    if backend == "cpu" and case.name not in COMPILED and not os.environ.get("TILEWISE_FUZZ"):
        pytest.skip("TILEWISE_FUZZ is not set")
    built = build(case)
    problem = replace(built.problem, tile=TILE) if backend == "tiled" else built.problem
    if is_empty(problem):
        pytest.skip("no backend sees an empty problem")
    for derivative in DERIVATIVES:
        verdict = dispatch.judge(backend, problem, derivative=derivative)
        if not verdict.ok:
            assert backend != "tiled", verdict.reasons
            pytest.skip("; ".join(verdict.reasons))
    assert not derivatives(problem, built.inputs, backend)


@pytest.mark.parametrize("name", ["mask-causal-window", "sinks-empty-rows"])
def test_without_a_stash(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the products of all keys have no room, the double backward computes them twice."""
    monkeypatch.setattr(frames, "STASH", 0)
    built = build(replace(BY_NAME[name], seqlen=150))
    assert not derivatives(built.problem, built.inputs, "cpu")


@pytest.mark.parametrize("moving", ["q", "k", "v", "b", "s", "qv"])
def test_what_stays_costs_nothing(moving: str) -> None:
    """A tangent that is None is zero."""
    case = Case("", seqlen=20, head_dim=8, bias=(1, -1, -1, -1), sinks=True, softcap=2.0, dtype=torch.float32)
    built = build(case)
    assert not derivatives(replace(built.problem, tile=TILE), built.inputs, "tiled", moving)
