"""Invariants of the counts that hold at any size: the simulator proves the small ones, these the large ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

import tilewise.masks as masks
from tests.model.strategies import problems, tiles
from tilewise import model
from tilewise.errors import PlanError
from tilewise.hardware import lookup
from tilewise.masks import allowed
from tilewise.model import TilePlan, compulsory, dram, roofline, standard, traffic, v2, visible_pairs
from tilewise.model.l2 import capacity, rounds, scattered, streamed
from tilewise.model.roof import waves
from tilewise.problem import Problem

H200 = lookup("h200")


def test_causal_halves_the_reads_of_keys() -> None:
    """Tr(Tr + 1)/2 of Tr² tiles."""
    full, half = (Problem.of(heads=1, seqlen=8192, head_dim=64, mask=mask) for mask in (None, masks.causal()))
    tile = TilePlan(128, 128)
    assert v2(half, tile).reads["K"] / v2(full, tile).reads["K"] == 65 / 128
    assert v2(half, tile).reads["Q"] == v2(full, tile).reads["Q"]


def test_grouped_heads_share_their_keys() -> None:
    """Compulsory bytes count a key head once; tiles read it for each query head, unless they are packed."""
    grouped = Problem.of(heads=32, kv_heads=8, seqlen=1, kv_seqlen=4096, head_dim=128)
    once = 8 * 4096 * 128 * 2
    assert compulsory(grouped, TilePlan(16, 64)).reads["K"] == once
    assert v2(grouped, TilePlan(16, 64)).reads["K"] == 4 * once
    assert traffic(grouped, TilePlan(16, 64, splits=8, pack_gqa=True), "decode").reads["K"] == once


def test_splits_cost_their_partial_results() -> None:
    problem = Problem.of(heads=4, seqlen=1, kv_seqlen=1024, head_dim=64, dtype="float16")
    whole = traffic(problem, TilePlan(16, 64), "decode")
    parts = traffic(problem, TilePlan(16, 64, splits=4), "decode")
    assert parts.writes["partial O"] == parts.reads["partial O"] == 4 * 4 * 64 * 4
    assert parts.reads["K"] == whole.reads["K"]
    assert parts.reads["Q"] == 4 * whole.reads["Q"]


def test_the_l2_takes_repeated_reads_off_the_memory() -> None:
    """K and V of 16k tokens fit, so they come from memory once; of 256k tokens they do not and come in every round."""
    tile = TilePlan(128, 128)
    short = Problem.of(heads=8, seqlen=16384, head_dim=128)
    assert dram(short, tile, v2(short, tile), H200, 132).reads["K"] == compulsory(short, tile).reads["K"]
    long = Problem.of(heads=1, seqlen=2**18, head_dim=128)
    moved, once = v2(long, tile), compulsory(long, tile)
    found = dram(long, tile, moved, H200, 132)
    again = rounds(long, tile, 132) - 1
    missing = 1 - capacity(H200) / streamed(long, tile)
    assert again == 15 and 0.7 < missing < 0.9
    assert found.reads["K"] == pytest.approx(once.reads["K"] * (1 + again * missing), rel=1e-9)
    assert once.total < found.total < moved.total


def test_blocks_that_begin_apart_read_some_of_their_stream_again() -> None:
    """Under a causal mask the blocks of dK and dV do; without one, or with a window, they stay together or soon end."""
    tile = TilePlan(32, 64, pass_="backward_dkdv")
    for mask, more in ((masks.full(), False), (masks.causal(), True), (masks.window(1024), False)):
        problem = Problem.of(heads=16, seqlen=8192, head_dim=128, mask=mask)
        least, between = compulsory(problem, tile), dram(problem, tile, traffic(problem, tile, "backward_dkdv"), H200, 264)
        assert (between.reads["Q"] > 1.05 * least.reads["Q"]) == more, mask
        assert between.reads["K"] == least.reads["K"]
    small = Problem.of(heads=16, seqlen=8192, head_dim=64, mask=masks.causal())
    assert scattered(small, tile, H200, 264) < 0.01  # half the bytes pass, and fit


@pytest.mark.parametrize("pass_", ["forward", "backward_dkdv", "backward_dq"])
def test_compulsory_bytes_of_each_pass(pass_: str) -> None:
    """Once is once: between it and the tile bytes lie the repeated reads alone, and nothing is written twice."""
    problem = Problem.of(heads=8, kv_heads=2, seqlen=4096, head_dim=64, mask=masks.causal(), bias=(1, 8, 4096, 4096))
    tile = TilePlan(128, 64, pass_=pass_)
    schedule = "v2" if pass_ == "forward" else pass_
    least, moved = compulsory(problem, tile), traffic(problem, tile, schedule)
    between = dram(problem, tile, moved, H200, 132)
    assert least.writes == moved.writes == between.writes
    for name in moved.reads:
        if name != "bias":  # half of the bias is behind the mask and never read
            assert least.reads[name] <= between.reads[name] <= moved.reads[name], name
    assert least.reads["K"] == 2 * 4096 * 64 * 2
    assert least.reads["Q"] == 8 * 4096 * 64 * 2


def test_partitioned_caches_hold_everything_twice() -> None:
    assert capacity(H200) == H200.l2_bytes // 2
    assert capacity(lookup("rtx4090")) == lookup("rtx4090").l2_bytes
    assert capacity(lookup("mi300x")) == lookup("mi300x").l3_bytes


@settings(deadline=None, max_examples=40)
@given(problem=problems(), tile=tiles())
def test_orders_hold(problem: Problem, tile: TilePlan) -> None:
    moved = v2(problem, tile)
    least, between = compulsory(problem, tile), dram(problem, tile, moved, H200, 132)
    for name in ("Q", "K", "V"):
        assert least.reads[name] <= between.reads[name] <= moved.reads[name]
    assert moved.writes == least.writes == between.writes


@settings(deadline=None, max_examples=40)
@given(problem=problems())
def test_visible_pairs_are_counted_exactly(problem: Problem) -> None:
    tile = allowed(problem.program, problem.shape, (0, problem.seqlen_q), (0, problem.seqlen_k), np.arange)
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    assert visible_pairs(problem) == np.count_nonzero(np.broadcast_to(True if tile is None else tile, shape))


@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0), (0, 0)])
def test_nothing_to_do_moves_nothing_but_outputs(m: int, n: int) -> None:
    problem = Problem.of(heads=2, seqlen=m, kv_seqlen=n, head_dim=4, dtype="float32")
    for schedule in model.SCHEDULES:
        moved = traffic(problem, TilePlan(4, 4), schedule)
        assert not moved.reads["K"] and not moved.reads["V"]
    assert v2(problem, TilePlan(4, 4)).writes["O"] == 2 * m * 4 * 4


def test_bad_schedules_raise() -> None:
    problem = Problem.of(heads=1, seqlen=8, head_dim=4)
    with pytest.raises(PlanError, match="schedule: got 'v9', need one of standard"):
        traffic(problem, TilePlan(4, 4), "v9")
    with pytest.raises(PlanError, match="kernels: got 4, need 3"):
        standard(problem, kernels=4)


def test_waves_and_roofline() -> None:
    assert waves(132, 132) == (1, 1.0)
    assert waves(133, 132) == (2, 133 / 264)
    assert waves(0, 132) == (0, 0.0)
    roof = roofline(1e12, 1e9, "bfloat16", H200)
    assert roof.bound == "compute" and roof.attainable == H200.flops("bfloat16")
    assert roofline(1e9, 1e9, "bfloat16", H200).bound == "memory"
