"""The Hopper backward's host side: which queries visit a tile of keys, who takes which tile, which kernels a shape gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tilewise.backends.hopper.backend import backend
from tilewise.backends.hopper.backward.arguments import BackwardPlan, make_plan
from tilewise.backends.hopper.backward.choose import visiting_queries
from tilewise.backends.hopper.backward.config import KEYS, KeysConfig
from tilewise.backends.hopper.backward.launch import Memory, plane, readable
from tilewise.backends.hopper.compile import Types
from tilewise.backends.hopper.intervals import IntervalMask, interval_mask, mask_of
from tilewise.backends.hopper.orders import heads_fitting
from tilewise.backends.hopper.structs import Arguments, Plane, PrePostArguments
from tilewise.backends.hopper.tile_order import tile_order
from tilewise.hardware import lookup
from tilewise.masks import Mask, TileMap
from tilewise.problem import Problem

MASKS: dict[str, Mask] = {
    "causal": tw.causal(),
    "top-left": tw.causal("top_left"),
    "offset": tw.causal(offset=40),
    "window": tw.window(150),
    "two-sided": tw.window(70, 200),
    "prefix-lm": tw.causal() | tw.prefix(300),
    "window and range": tw.window(260) & tw.prefix(700),
}


def problem_of(mask: Mask | None = None, queries: int = 1000, keys: int | None = None, **more: Any) -> Problem:
    fields: dict[str, Any] = {"batch": 2, "heads": 4, "head_dim": 128, "device": "cuda", **more}
    return Problem.of(seqlen=queries, kv_seqlen=keys, mask=mask, **fields)


def plan_of(problem: Problem, processors: int = 8, **more: Any) -> BackwardPlan:
    return make_plan(problem, replace(lookup("h200"), units=processors), lambda *_: None, **more)


@pytest.mark.parametrize("lengths", [(1000, 1000), (300, 1500), (1500, 300), (64, 129)], ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_visiting_queries_are_those_of_the_mask(d: int, name: str, lengths: tuple[int, int]) -> None:
    problem = problem_of(MASKS[name], *lengths)
    form = interval_mask(problem.program, *lengths)
    assert isinstance(form, IntervalMask)
    tile = KEYS[d, d]
    tiles = TileMap(problem.program, problem.shape, tile.BLOCK_M, tile.BLOCK_N)
    want = [max(1, int(np.count_nonzero(tiles.col(j)))) * tile.BLOCK_M for j in range(tiles.cols)]
    assert visiting_queries(form, tile, *lengths).tolist() == want


def test_packed_batches_add_up_dq_whatever_their_mean_length() -> None:
    """A batch of 501 sequences and 32k tokens may be one of 16k beside 500 of 32: seven products would cost 1.3 times as much."""
    kernels = {
        varlen: [step.name for step in plan_of(problem_of(tw.causal(), 512, batch=64, varlen=varlen)).steps]
        for varlen in (False, True)
    }
    assert "queries_kernel" in kernels[False]
    assert "queries_kernel" not in kernels[True] and "postprocess_kernel" in kernels[True]


def taken(a: Arguments) -> list[list[int]]:
    """The tiles of each program, as `schedule.tile_at` gives them."""
    programs = []
    for me in range(a.programs):
        if a.order is not None:
            column = a.order[:, me].tolist()
        else:
            rounds = range(-(-a.total // a.programs) + 1)
            line = [i * a.programs + (me if i % 2 == 0 else a.programs - 1 - me) for i in rounds]
            column = [t if t < a.total else -1 for t in line]
        assert column[-1] < 0 or a.order is None
        programs.append(column[: column.index(-1)] if -1 in column else column)
    return programs


@pytest.mark.parametrize("mask", [None, tw.causal(), tw.window(200), ~tw.causal()], ids=repr)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_every_tile_once(d: int, deterministic: bool, mask: Mask | None) -> None:
    problem = problem_of(mask, 1300, 900, head_dim=d, heads=6, kv_heads=3, deterministic=deterministic)
    plan = plan_of(problem)
    walks = [(step.config, step.arguments) for step in plan.steps if isinstance(step.arguments, Arguments)]
    assert walks
    for config, walk in walks:
        keys = hasattr(config, "REDUCE_DQ")
        blocks = -(-900 // config.BLOCK_N) if keys else -(-1300 // config.BLOCK_M)
        assert walk.total == blocks * 2 * (3 if keys else 6)
        assert sorted(t for mine in taken(walk) for t in mine) == list(range(walk.total))


def test_heads_stay_in_the_cache_unless_much_is_gained() -> None:
    """dK and dV. Streams of 2 MiB: eight heads stay together, though 32 would be 1.4 % more even. Grouped heads gain 11 %, and
    windows are local, so that heads of whole streams tell nothing."""

    def found(mask: Mask, length: int, **heads: int) -> tuple[Any, Any]:
        problem = problem_of(mask, length, head_dim=128, **heads)
        walk, config = plan_of(problem, 132).steps[1].arguments, plan_of(problem, 132).steps[1].config
        assert isinstance(walk, Arguments) and isinstance(config, KeysConfig)
        times = visiting_queries(mask_of(problem), config, length, length)[::-1] * problem.group
        own = problem.batch * problem.kv_heads
        return walk.order, tile_order(times, own, heads_fitting(problem, config, own), 132)[0]

    order, in_cache = found(tw.causal(), 2048, batch=8, heads=16)
    assert order.shape == in_cache.shape and (order == in_cache).all()
    for mask, sizes in ((tw.causal(), {"batch": 4, "heads": 24, "kv_heads": 8}), (tw.causal() & tw.window(512), {"heads": 16})):
        order, in_cache = found(mask, 4096, **{"batch": 4, **sizes})
        assert order.shape != in_cache.shape or (order != in_cache).any()


@pytest.mark.parametrize("length", [512, 2048, 16384])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_even_loads(d: int, length: int) -> None:
    """Tiles of keys are numbered from the first, which under a causal mask all queries see."""
    problem = problem_of(tw.causal(), length, batch=16384 // length, heads=2048 // d, head_dim=d)
    plan = plan_of(problem, 132)
    walk, config = plan.steps[1].arguments, plan.steps[1].config
    assert isinstance(walk, Arguments)
    blocks = length // config.BLOCK_N
    cost = [length - (t % blocks) * config.BLOCK_N + 160 for t in range(walk.total)]
    loads = [sum(cost[t] for t in mine) for mine in taken(walk)]
    assert max(loads) <= 1.05 * sum(loads) / 132


def names(problem: Problem) -> list[str]:
    return [step.name for step in plan_of(problem).steps]


SUMS = ["preprocess_kernel", "keys_kernel", "postprocess_kernel"]
SEPARATE_DQ = ["preprocess_kernel", "keys_kernel", "queries_kernel"]


@pytest.mark.parametrize(
    ("problem", "want"),
    [
        (problem_of(), SUMS),
        (problem_of(tw.causal(), 2048), SUMS),
        (problem_of(tw.causal(), 512), SEPARATE_DQ),
        (problem_of(tw.causal() & tw.window(128), 16384), SEPARATE_DQ),
        (problem_of(deterministic=True), SEPARATE_DQ),
        (problem_of(head_dim=64), SUMS),
        (problem_of(tw.causal(), 512, head_dim=64), SUMS),
        (problem_of(head_dim=64, softcap=2.0), SUMS),
        (problem_of(head_dim=64, scale=-1.0), SUMS),
        (problem_of(head_dim=64, scale=-1.0, deterministic=True), SEPARATE_DQ),
        (problem_of(head_dim=256), ["preprocess_kernel", "split_kernel", "queries_kernel"]),
        (problem_of(head_dim=192, head_dim_v=128), ["preprocess_kernel", "split_kernel", "queries_kernel"]),
    ],
    ids=str,
)
def test_which_kernels(problem: Problem, want: list[str]) -> None:
    assert names(problem) == want


def test_scratch_memory() -> None:
    """fp32 dQ and two numbers a row at most, up to whole tiles and one spare; none for dQ where it has its own kernel."""
    plan = plan_of(problem_of(queries=1024))
    assert plan.stats == 2 * 2 * 4 * 1024
    assert plan.dq == 2 * 4 * 1024 * 128 + 64 * 128
    assert plan_of(problem_of(queries=1024, deterministic=True)).dq == 0


def test_statistics_of_seeded_products() -> None:
    """Products start at -lse / (scale · log2 e): times the unit of scores that is -lse in units of log 2."""
    plan = plan_of(problem_of(head_dim=64))
    first, second = plan.steps[0].arguments, plan.steps[1].arguments
    assert isinstance(first, PrePostArguments) and isinstance(second, Arguments)
    assert first.factor * second.scale_log2 == pytest.approx(-1 / np.log(2))


def test_packed_batches_need_no_lengths() -> None:
    problem = problem_of(tw.causal(), 1000, 1100, batch=3, varlen=True)
    a = plan_of(problem).steps[1].arguments
    assert isinstance(a, Arguments)
    assert a.blocks.value == 1100 // 128 + 3 and a.stat_blocks == 1000 // 64 + 3
    assert a.order == a.cu_q == a.cu_k == "*i32"


def test_types_of_arguments() -> None:
    types = Types(aligned=True)
    found = types.of((None, 3, 2.0, "*fp32", Plane("*bf16", 1, 2, 3, 64)), (1,))
    assert found == ("constexpr", "i32", "fp32", "*fp32", Plane("*bf16", "i64", "i64", "i64", "i32"))  # type: ignore[arg-type]
    assert types.constants == {(1, 0): None}
    assert types.attributes[1, 3] == types.attributes[1, 4, 0] == [["tt.divisibility", 16]]
    assert types.attributes[1, 4, 1] == [["tt.divisibility", 8]]


def memory_of(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None = None) -> Memory:
    return Memory(out, out, out, out, out[..., 0], dout, dlse, out, out, out, out, None, None)


def test_gradients_in_any_layout_are_copied() -> None:
    x = torch.randn(2, 4, 16, 64).half()
    tidy = memory_of(x, x)
    assert readable(tidy) is tidy
    # as sum().backward() makes it
    broadcast = torch.ones(()).half().expand(2, 4, 16, 64)
    turned = torch.randn(2, 4, 64, 16).half().transpose(2, 3)
    for dout in (broadcast, turned):
        found = readable(memory_of(x, dout))
        assert found.dout.is_contiguous() and torch.equal(found.dout, dout) and found.out is x
    dlse = torch.randn(2, 16, 4).transpose(1, 2)
    assert torch.equal(readable(memory_of(x, x, dlse)).dlse, dlse)  # type: ignore[arg-type]


def test_planes_ignore_strides_that_are_never_stepped_over() -> None:
    x = torch.zeros(1, 4, 16, 64).transpose(1, 2)
    assert plane(x)[1:] == (0, 64, 1024, 64)


@pytest.mark.parametrize("more", [{}, {"head_dim": 256, "varlen": True}, {"head_dim": 264}], ids=str)
def test_gradients_are_served_where_outputs_are(more: dict[str, Any]) -> None:
    problem = problem_of(**more)
    assert backend.supports(problem, backward=True) == backend.supports(problem)
