"""The same on a GPU: tensors stay there, and what is found does not depend on where they are."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.conformance.cases import BY_NAME, build
from tilewise import dispatch, hardware
from tilewise.backends import plans
from tilewise.backends.base import BackwardInputs, Inputs
from tilewise.backends.gpu.record import Launch, Recording
from tilewise.backends.hopper.structs import PrePostArguments
from tilewise.diagnostics.certify import certify
from tilewise.diagnostics.explain import explain
from tilewise.diagnostics.trace import trace_nonfinite
from tilewise.problem import Problem

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


def drawn(seed: int, backend: str) -> Problem:
    """A random problem, every second one with a tile that some kernel has."""
    rng = random.Random(seed)
    kv_heads, queries = rng.choice((1, 2)), rng.choice((1, 64, 300, 2048))
    problem = Problem.of(
        batch=rng.choice((1, 3)), heads=kv_heads * rng.choice((1, 4)), kv_heads=kv_heads, seqlen=queries,
        kv_seqlen=rng.choice((queries, 1000)), head_dim=rng.choice((64, 96, 128, 256)), device="cuda",
        dtype=rng.choice(("float16", "bfloat16")), mask=rng.choice((tw.full(), tw.causal(), tw.window(100))),
    )  # fmt: skip
    if seed % 2:
        spec = hardware.device("cuda")
        offers = {pass_: plans.choices(backend, problem, spec, pass_) for pass_ in plans.tiles(backend, problem, spec)}
        pass_, tiles = rng.choice([(pass_, tiles) for pass_, tiles in offers.items() if len(tiles) > 1] or [("", [])])
        problem = replace(problem, tile=((pass_, *rng.choice(tiles).sizes),)) if tiles else problem
    return problem


def streams(launch: Launch) -> bool:
    """Does its kernel walk over keys, queries or parts, tile by tile? While launches are collected, Hopper's have no kernel."""
    walks = ("forward_kernel", "merge_kernel", "keys_kernel", "queries_kernel")
    return not isinstance(launch.args[-1], PrePostArguments) and getattr(launch.kernel, "__name__", walks[0]) in walks


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_the_tile_of_a_launch_is_the_one_explained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 random problems, forward and backward, on the device at hand. Nothing is compiled or computed."""
    backend, found = dispatch.get(name), list[Launch]()
    if not backend.usable("cuda").ok:
        pytest.skip(f"no {name} here")
    monkeypatch.setattr(Recording, "record", lambda self, tensors, launches: found.extend(launches))
    seen: set[Any] = set()
    for seed in range(200):
        problem = drawn(seed, name)
        shape = problem.batch, problem.heads, problem.seqlen_q, problem.head_dim
        q, out, dout = (torch.empty(shape, dtype=getattr(torch, problem.dtype), device="cuda") for _ in range(3))
        k = q.new_empty(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)
        inputs, given = Inputs(q, k, k), BackwardInputs(out, torch.empty(shape[:3], device="cuda"), dout)
        found.clear()
        backend.missing_kernels(problem, inputs), backend.missing_kernels(problem, inputs, given)
        shown = [tile for tile in explain(problem, device="cuda", backend=name).plan.passes if tile.block_k > 1]
        sizes = [(launch.config.BLOCK_M, launch.config.BLOCK_N) for launch in found if streams(launch)]
        assert sizes == [tile.sizes for tile in shown], (problem, sizes, shown)
        for pass_, *sides in problem.tile:
            assert tuple(sides) == next(tile.sizes for tile in shown if tile.pass_ == pass_)
        seen |= {(tile.pass_, tile.sizes) for tile in shown}
    assert len(seen) > 8, seen
