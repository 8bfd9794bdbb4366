"""DRAM bytes by playing an order through: distances against a plain count, and what the orders of the Hopper kernels leave."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.backends import plans
from tilewise.backends.hopper import arguments
from tilewise.backends.hopper.backward import arguments as backward
from tilewise.hardware import lookup
from tilewise.masks import causal, window
from tilewise.model import TilePlan, dram, traffic
from tilewise.model.replay import MOST_READS, Played, overflow, played, stack_distances
from tilewise.model.tile import WorkOrder
from tilewise.problem import Problem

H200 = lookup("h200")
KEPT = 42 << 20


def tile_of(problem: Problem, pass_: str = "backward") -> TilePlan:
    return plans.tiles("hopper", problem, H200)[pass_]


def shaped(heads: int = 16, kv_heads: int = 16, seqlen: int = 8192, head_dim: int = 128, **more: Any) -> Problem:
    shape = {"heads": heads, "kv_heads": kv_heads, "seqlen": seqlen, "head_dim": head_dim, "mask": causal(), "dtype": "bfloat16"}
    return Problem.of(device="cuda", **{**shape, **more})


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=70))
def test_distances_are_the_bytes_of_the_other_tiles_touched_since(touches: list[tuple[int, int]]) -> None:
    sizes: dict[int, int] = {}
    size = np.array([sizes.setdefault(tile, size) for tile, size in touches])
    tile = np.array([tile for tile, _ in touches])
    far, again = stack_distances(tile, size)
    expected = []
    for n, (one, _) in enumerate(touches):
        before = [m for m in range(n) if touches[m][0] == one]
        assert again[n] == bool(before)
        if before:
            expected.append(sum(sizes[other] for other in {t for t, _ in touches[before[-1] + 1 : n]}))
    assert far.tolist() == expected


def test_a_read_is_lost_when_more_passes_than_the_cache_keeps() -> None:
    lost = overflow(np.array([0.0, 0.3, 0.7, 1.0, 1.5, 3.0]))
    assert lost[0] == 0 and lost[1] < 1e-3 and 0.3 < lost[3] < 0.7 and lost[5] > 0.99
    assert (np.diff(lost) > 0).all()


@pytest.mark.parametrize("problem", [
    shaped(), shaped(16, 4), shaped(24, 8, 3000), shaped(seqlen=4096, head_dim=64, mask=None),
    shaped(mask=causal() & window(700)), shaped(8, 8, 2048, 256, batch=3),
    shaped(8, 2, 1000, 256, mask=None), shaped(2, 1, 100), shaped(16, 4, deterministic=True),
])  # fmt: skip
def test_the_order_that_is_played_is_the_one_that_runs(problem: Problem) -> None:
    steps = backward.make_plan(problem, H200, lambda *given: given[0]).steps
    orders = {step.kernel: step.arguments.order for step in steps if step.kernel[:3] not in ("pre", "pos")}
    orders["forward_kernel"] = arguments.make_plan(problem, H200, lambda *given: None).arguments.order
    for tile in plans.tiles("hopper", problem, H200).values():
        if tile.kernel not in orders:
            assert tile.order is None
            continue
        assert tile.order is not None
        order = tile.order(problem, H200.units)
        assert order is not None
        taken = order.tiles[order.tiles >= 0]
        length, block = (problem.seqlen_k, tile.block_k) if tile.holds_keys else (problem.seqlen_q, tile.block_q)
        heads = problem.batch * (problem.kv_heads if tile.holds_keys else problem.heads)
        assert sorted(taken) == list(range(-(-length // block) * heads))
        if orders[tile.kernel] is None:  # each program takes every so many-th
            assert (order.tiles.reshape(-1)[: len(taken)] == np.arange(len(taken))).all()
        else:
            assert (order.tiles == orders[tile.kernel]).all()


def test_orders_that_the_device_writes_are_not_foreseen() -> None:
    packed = Problem.of(device="cuda", batch=2, heads=8, seqlen=3000, varlen=True, head_dim=128, mask=causal(), dtype="bfloat16")
    tile = tile_of(packed)
    assert tile.order is not None and tile.order(packed, H200.units) is None
    assert played(packed, tile, H200.units, KEPT) is None
    assert played(shaped(), replace(tile_of(shaped()), order=None), H200.units, KEPT) is None


def test_heads_that_share_keys_read_their_queries_about_once() -> None:
    """H200, dK and dV of 16/4 heads, 8192 tokens, causal: 278.6 MB from memory with heads one after the other, 198 in turns."""
    problem = shaped(16, 4)
    tile = tile_of(problem)
    assert tile.order is not None
    order = tile.order(problem, H200.units)
    assert order is not None and order.heads_inside
    turns = played(problem, tile, H200.units, KEPT)
    outside = played(problem, replace(tile, order=lambda problem, units: order._replace(heads_inside=False)), H200.units, KEPT)
    assert turns is not None and outside is not None
    assert turns.stream < 1.5 and outside.stream > 4
    everything = played(problem, tile, H200.units, 1 << 40)
    assert everything == Played(1.0, 1.0)


def test_what_fits_comes_once_and_long_plays_end() -> None:
    problem = shaped(seqlen=2048)
    tile = tile_of(problem, "forward")
    once = 3 * 16 * 2048 * 128 * 2
    assert dram(problem, tile, traffic(problem, tile), H200, 132).total_read == pytest.approx(once, rel=1e-3)
    long = shaped(32, 32, 1 << 17)
    assert 50 * MOST_READS < 16 * ((1 << 17) // 128) ** 2
    found = played(long, tile_of(long, "forward"), H200.units, KEPT)
    assert found is not None and 1.0 < found.stream < 200


def test_an_order_is_no_part_of_what_a_tile_is() -> None:
    tile = tile_of(shaped(16, 4))
    assert tile == replace(tile, order=None) and hash(tile) == hash(replace(tile, order=None))
    assert "order" not in tile.to_dict() and "order" not in repr(tile)


def test_tiles_keep_no_problem_alive() -> None:
    """Else the tensors of its mask would stay until garbage is collected."""
    problem = shaped(16, 4)
    plans.tiles("hopper", problem, H200)
    gc.disable()
    try:
        seen = weakref.ref(problem)
        del problem
        assert seen() is None
    finally:
        gc.enable()


def test_an_empty_order_plays_nothing() -> None:
    tile = replace(tile_of(shaped()), order=lambda problem, units: WorkOrder(np.full((1, 4), -1, dtype=np.int32)))
    assert played(shaped(), tile, H200.units, KEPT) == Played(1.0, 1.0)
    assert played(shaped(seqlen=0), tile, H200.units, KEPT) is None
