"""Windows that are wide for the ranks: even, and each row that a rank's queries see and it does not hold sent once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tilewise as tw
from tests.distributed.test_plan_bytes import both
from tests.distributed.test_shards import LONG, long_problem
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.least import total
from tilewise.distributed.routes import routes
from tilewise.distributed.shards import dealt, excess, filled


def window_bound(plan: ContextPlan, window: int) -> int:
    """Of a causal window: each row that a rank's queries see and it does not hold, once, by the cheaper route of its interval.

    Counted from the ranks' tokens alone: a token is seen by those of the next `window` that a rank holds.
    """
    query, key, bound = plan.row_bytes.route("q"), plan.row_bytes.route("kv"), 0
    held = [plan.token_numbers(rank) for rank in range(plan.ranks)]
    for own, other in itertools.permutations(held, 2):
        keys = other[np.searchsorted(own, other) < np.searchsorted(own, other + window)]
        for run in np.split(keys, np.flatnonzero(np.diff(keys) != 1) + 1):
            if len(run):
                queries = int(np.searchsorted(own, run[-1] + window) - np.searchsorted(own, run[0]))
                bound += len(run) * (min(query, key) if queries * query < len(run) * key else key)
    return bound


@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 16, 24, 32, 64])
@pytest.mark.parametrize("times", [1.5, 2, 4])
def test_windows_wider_than_a_rank_send_each_row_once(times: float, ranks: int, kv_heads: int) -> None:
    """By a count of their own, of lengths that ranks divide and that they do not. No rank has too much either."""
    for tokens in (4096, 30011):
        window = int(times * tokens / ranks)
        if window >= tokens:
            continue
        plan = tw.distributed.plan(long_problem(tw.causal() & tw.window(window), tokens, kv_heads=kv_heads), ranks=ranks)
        assert both(plan) <= 1.05 * window_bound(plan, window), tokens
        assert plan.least_bytes().rows == window_bound(plan, window)
        assert plan.imbalance <= 0.03 and np.ptp(plan.shards.tokens) <= 128


@pytest.mark.parametrize(("part", "ranks"), [(12, 2), (12, 8), (8, 4), (8, 8), (8, 16), (6, 3), (4, 2), (4, 4), (3, 2), (3, 3)])
def test_wide_windows_send_each_row_once_by_the_cheaper_route(part: int, ranks: int) -> None:
    """As many key heads as query heads, and windows up to the tokens of a rank: contiguous shards, made even by queries."""
    plan = tw.distributed.plan(long_problem(tw.causal() & tw.window(LONG // part), kv_heads=32), ranks=ranks)
    assert len(plan.shards.rank) == ranks and plan.imbalance <= 0.03
    assert plan.least_bytes().of_rows <= 1.05


@pytest.mark.parametrize(("part", "ranks"), [(3, 4), (2, 3), (2, 4), (4, 8), (2, 16), (5, 16), (8, 32), (16, 64)])
def test_wider_windows_send_each_row_once_too(part: int, ranks: int) -> None:
    """Ranks are filled by the area of keys, which is even if queries travel. By that of queries, they send more."""
    wide = long_problem(tw.causal() & tw.window(LONG // part), kv_heads=32)
    plan = tw.distributed.plan(wide, ranks=ranks)
    assert plan.imbalance <= 0.03 and plan.least_bytes().of_rows <= 1.05
    other = routes(filled((LONG,), ranks, plan.coverage), plan.coverage, plan.row_bytes, keys_only=True)
    assert excess(other.areas) <= 0.03 and both(plan) <= 0.9 * total(other, plan.row_bytes)


@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize(("part", "ranks"), [(4, 4), (4, 16), (3, 8), (2, 3), (2, 16), (2, 64), (64, 64)])
def test_wide_two_sided_windows_are_even_and_send_each_row_once(part: int, ranks: int, kv_heads: int) -> None:
    """Fewer rows see the keys at both ends, so that a head and a tail are both light."""
    plan = tw.distributed.plan(long_problem(tw.window(LONG // part // 2, LONG // part // 2), kv_heads=kv_heads), ranks=ranks)
    assert plan.imbalance <= 0.03 and plan.least_bytes().of_rows <= 1.05


@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("ranks", [2, 3, 8, 32])
def test_wide_windows_with_sinks_send_each_row_once(ranks: int, kv_heads: int) -> None:
    mask = tw.causal() & (tw.window(LONG // 5) | tw.prefix(64))
    plan = tw.distributed.plan(long_problem(mask, kv_heads=kv_heads), ranks=ranks)
    assert plan.imbalance <= 0.03 and plan.least_bytes().of_rows <= 1.05


@pytest.mark.parametrize("tokens", [96, 1000, 8192])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_short_wide_windows_send_each_row_once(tokens: int, ranks: int) -> None:
    for part in (2, 3, 5):
        for mask in (tw.causal() & tw.window(tokens // part), tw.window(tokens // part // 2, tokens // part // 2)):
            plan = tw.distributed.plan(long_problem(mask, tokens, kv_heads=32), ranks=ranks)
            assert plan.imbalance <= 0.03 and plan.least_bytes().of_rows <= 1.05, (part, mask)


@pytest.mark.parametrize(("part", "ranks"), [(3, 4), (2, 3), (5, 16), (8, 32)])
def test_given_shards_give_up_evenness_where_both_cannot_be(part: int, ranks: int) -> None:
    """Contiguous ones under a wide window: made even, they would send 1.1 to 1.3 times the bytes of their rows."""
    wide = long_problem(tw.causal() & tw.window(LONG // part), kv_heads=32)
    plan = tw.distributed.plan(wide, ranks=ranks, shards=dealt((LONG,), ranks))
    own = excess(plan.shards.areas(plan.coverage))
    assert plan.least_bytes().of_rows <= 1.05 and 0.03 < plan.imbalance <= own


def test_contiguous_shards_of_a_window_are_levelled_by_queries() -> None:
    """A window of nearly a third of the sequence leaves the first rank with less: queries go there, and few bytes are sent."""
    wide = long_problem(tw.causal() & tw.window(40_000), kv_heads=32)
    plan = tw.distributed.plan(wide, ranks=2)
    assert len(plan.shards.rank) == 2 and plan.imbalance <= 0.03
    assert plan.shards.areas(plan.coverage).max() > 1.15 * plan.shards.areas(plan.coverage).mean()
    assert plan.least_bytes().of_rows <= 1.05
