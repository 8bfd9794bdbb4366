"""Orders of work tiles for the parts of a context-parallel call: few rounds, and rows of which only the first key is bounded."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

import tilewise as tw
from tests.backends.test_hopper_host import order, plan_for, problem_of
from tilewise.backends.hopper.tile_order import OVERHEAD_KEYS, UNEVEN, evened, tile_order


@pytest.mark.parametrize("length", [512, 4224])
def test_even_loads_where_only_the_first_key_is_bounded(length: int) -> None:
    """As rows at a window's edge that wait for keys of another rank. Taking turns comes out at 75 to 88 %."""
    problem = problem_of(~tw.causal(), length, length, heads=64, head_dim=128)
    plan = plan_for(problem, 132)
    block, step = plan.config.BLOCK_M, plan.config.BLOCK_N
    loads = [
        sum((length - min(m + 1, length - 1) // step * step) + OVERHEAD_KEYS for _, m in mine)
        for mine in order(plan.arguments, block)
    ]
    assert max(loads) <= 1.1 * sum(loads) / 132
    assert plan.config.LEFT and not plan.config.BAND


@pytest.mark.parametrize(("blocks", "heads", "cluster"), [(52, 16, 2), (56, 16, 1), (17, 16, 4)])
def test_exchanged_tiles_make_the_longest_program_shorter(blocks: int, heads: int, cluster: int) -> None:
    """Streams of a rank's part of a wide window: a few rounds of tiles that differ by less than half."""
    keys = np.minimum(6000 + 128 * np.arange(blocks), 11000)
    first, _ = tile_order(keys, heads, cluster, 132)
    found = evened(first, keys, cluster)
    assert sorted(found.ravel().tolist()) == sorted(first.ravel().tolist()) and (found[-1] < 0).all()
    before, after = (program_loads(each, keys) for each in (first, found))
    assert before.max() > UNEVEN * before.mean() and after.max() < before.max() and after.sum() == before.sum()


def test_orders_that_are_even_or_long_stay() -> None:
    keys = np.arange(128, 8193, 128)
    for heads in (16, 256):
        found, _ = tile_order(keys, heads, 4, 132)
        assert evened(found, keys, 4) is found


def program_loads(taken: np.ndarray, keys: np.ndarray) -> np.ndarray:
    found = np.where(taken >= 0, keys[::-1][np.maximum(taken, 0) % len(keys)] + OVERHEAD_KEYS, 0).sum(0)
    return np.asarray(found)
