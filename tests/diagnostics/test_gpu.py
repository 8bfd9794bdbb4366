"""The same on a GPU: tensors stay there, and what is found does not depend on where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.cases import BY_NAME, build
from tests.diagnostics.explained import drawn, sizes_of
from tilewise import dispatch, hardware
from tilewise.backends.base import BackwardInputs, Inputs
from tilewise.backends.gpu.record import Launch, Recording
from tilewise.diagnostics.certify import certify
from tilewise.diagnostics.explain import explain
from tilewise.diagnostics.trace import trace_nonfinite

NAMES = ("mask-causal-documents", "mask-blocks-heads", "everything", "varlen-everything", "gqa-bf16", "alibi")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_certify_trace_and_explain(name: str) -> None:
    built = build(BY_NAME[name], "cuda")
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), built.packed or (), strict=False))
    out, lse = built.call("auto")
    found = certify(built.q, built.k, built.v, out, lse=lse, rows="all", **built.options, **packed)
    assert found.ok, str(found)
    assert trace_nonfinite(built.q, built.k, built.v, **built.options, **packed).clean
    told = explain(built.q, built.k, built.v, **built.options, **packed)
    assert told.live and told.chosen is not None and told.spec.is_gpu


@pytest.mark.gpu
def test_a_planted_nan_is_found_where_it_is() -> None:
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    v[0, 1, 200, 5] = float("nan")
    first = trace_nonfinite(q, k, v, tile=(64, 64)).first
    assert first is not None
    assert (first.head, first.query_tile, first.key_tile, first.step, first.key) == (1, 0, 3, "v load", 200)


@pytest.mark.gpu
def test_measured_time_is_split_by_cause() -> None:
    q, k, v = (torch.randn(1, 8, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = explain(q, k, v, measure=True).measured
    assert found is not None and 0 < found.of_ceiling < 1.2
    assert found.ideal + sum(found.losses.values()) == pytest.approx(max(found.seconds, found.ideal))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_the_tile_of_a_launch_is_the_one_explained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 random problems, forward and backward, on the device at hand. Nothing is compiled or computed."""
    backend, found, spec = dispatch.get(name), list[Launch](), hardware.device("cuda")
    if not backend.usable("cuda").ok:
        pytest.skip(f"no {name} here")
    monkeypatch.setattr(Recording, "record", lambda self, tensors, launches: found.extend(launches))
    seen: set[Any] = set()
    for seed in range(200):
        problem = drawn(seed, name, spec)
        shape = problem.batch, problem.heads, problem.seqlen_q, problem.head_dim
        q, out, dout = (torch.empty(shape, dtype=getattr(torch, problem.dtype), device="cuda") for _ in range(3))
        k = q.new_empty(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)
        inputs, given = Inputs(q, k, k), BackwardInputs(out, torch.empty(shape[:3], device="cuda"), dout)
        found.clear()
        backend.missing_kernels(problem, inputs), backend.missing_kernels(problem, inputs, given)
        shown = [tile for tile in explain(problem, device="cuda", backend=name).plan.passes if tile.block_k > 1]
        assert sizes_of(found) == [tile.sizes for tile in shown], (problem, sizes_of(found), shown)
        for pass_, *sides in problem.tile:
            assert tuple(sides) == next(tile.sizes for tile in shown if tile.pass_ == pass_)
        seen |= {(tile.pass_, tile.sizes) for tile in shown}
    assert len(seen) > 8, seen
