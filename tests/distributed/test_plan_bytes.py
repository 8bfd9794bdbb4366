"""What a plan sends: nothing unseen, no row twice, by the cheaper route; predicted times; other schedules beside."""

from __future__ import annotations

import itertools
from typing import Any

import networkx
import numpy as np
import pytest

import tilewise as tw
from tests.distributed.test_plan import masks, problem, visible
from tests.distributed.test_shards import LONG, document_ids, long_problem
from tests.test_imports import fresh, loaded
from tilewise import hardware
from tilewise.distributed.comparison import SCHEDULES
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.predict import predicted, unfilled_seconds
from tilewise.distributed.routes import routes
from tilewise.distributed.shards import partition
from tilewise.distributed.show import show_comparison
from tilewise.errors import ArgumentError, ArgumentTypeError, DeviceError, LayoutError, PlanError


def both(plan: ContextPlan) -> int:
    """Bytes of the forward and the backward pass."""
    return plan.total_bytes() + plan.total_bytes(backward=True)


def least_cover(pairs: np.ndarray[Any, Any], query: int, key: int, extra: float = 0.0) -> tuple[float, int]:
    """The least bytes with which each visible pair has its query or its key moved: a minimum cut.

    extra: bytes that a pair counts more if the keys' rank computes it. Also returned: how many pairs that does then.
    """
    rows, many_rows = np.unique(pairs, axis=0, return_counts=True)
    table, many_columns = np.unique(rows, axis=1, return_counts=True)
    area = table * many_rows[:, None] * many_columns
    of_rows, of_columns = area.sum(axis=1), area.sum(axis=0)
    query_cost = query * many_rows - max(-extra, 0) * of_rows  # a query that stays leaves all its pairs with the queries
    key_cost = key * many_columns - max(extra, 0) * of_columns  # a key that stays brings all of its to the keys
    graph = networkx.DiGraph()
    for q, k in zip(*(side.tolist() for side in np.nonzero(table)), strict=True):
        graph.add_edge("queries", ("q", q), capacity=max(query_cost[q], 0))
        graph.add_edge(("q", q), ("k", k))
        graph.add_edge(("k", k), "keys", capacity=max(key_cost[k], 0))
    if not graph:
        return 0.0, 0
    value, (near, _) = networkx.minimum_cut(graph, "queries", "keys")
    value += max(extra, 0) * area.sum() + np.minimum(query_cost, 0).sum() + np.minimum(key_cost, 0).sum()
    if extra < 0:
        return value, sum(int(of_rows[q]) for q in range(len(of_rows)) if ("q", q) not in near)
    return value, sum(int(of_columns[k]) for k in range(len(of_columns)) if ("k", k) not in near and key_cost[k] >= 0)


def lower_bound(plan: ContextPlan, price: Any = None) -> tuple[float, np.ndarray[Any, Any]]:
    """The fewest bytes of any division of the work, and the area that each rank has then.

    With prices of ranks for their area: of any division in which no rank has more than in the plan, if its area is even.
    """
    seen, held = visible(plan), [plan.token_numbers(rank) for rank in range(plan.ranks)]
    price = np.zeros(plan.ranks) if price is None else price
    costs = plan.row_bytes.route("q"), plan.row_bytes.route("kv")
    loads = np.array([seen[own].sum() for own in held], float)
    bound = float(price @ (loads - max(loads.max(), 1.03 * loads.mean())))
    for q, k in itertools.permutations(range(plan.ranks), 2):
        value, given = least_cover(seen[np.ix_(held[q], held[k])], *costs, price[k] - price[q])
        bound, loads[q], loads[k] = bound + value, loads[q] - given, loads[k] + given
    return bound, loads


def even_bound(plan: ContextPlan, rounds: int = 30) -> float:
    """Of the fewest bytes of a division that is even: the best of some prices, each of which proves a bound."""
    price, best = np.zeros(plan.ranks), 0.0
    for _ in range(rounds):
        bound, loads = lower_bound(plan, price)
        best, over = max(best, bound), loads - 1.03 * loads.mean()
        price = np.maximum(price + over * max(both(plan) - bound, 0) / max(float(over @ over), 1.0), 0)
    return best


@pytest.mark.parametrize("name", [name for name in masks(8) if name != "nothing"])
@pytest.mark.parametrize("shards", ["contiguous", "head_tail", "zigzag"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_bytes_are_near_the_least(name: str, shards: str, kv_heads: int) -> None:
    plan = tw.distributed.plan(problem(96, masks(96)[name], kv_heads=kv_heads), ranks=4, shards=shards)
    least, _ = lower_bound(plan)
    assert least <= both(plan) <= 1.05 * least


@pytest.mark.parametrize("name", [name for name in masks(8) if name not in ("documents", "nothing")])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_even_shards_with_few_key_heads_are_near_the_least(name: str, ranks: int) -> None:
    plan = tw.distributed.plan(problem(96, masks(96)[name], kv_heads=1), ranks=ranks)
    least, _ = lower_bound(plan)
    assert least <= both(plan) <= 1.05 * least


@pytest.mark.parametrize(("ranks", "times"), [(2, 1.38), (3, 1.30), (4, 1.28)])
def test_even_shards_with_as_many_key_heads_cannot_be(ranks: int, times: float) -> None:
    """Of a causal mask: whoever sends the least computes unevenly. The plan is within 3 % of what an even division must send."""
    plan = tw.distributed.plan(problem(96, tw.causal(), kv_heads=4), ranks=ranks)
    least, loads = lower_bound(plan)
    assert loads.max() > 1.4 * loads.mean()
    assert plan.imbalance <= 0.03
    assert times * least <= even_bound(plan) <= both(plan) <= 1.03 * even_bound(plan)


def test_tokens_dealt_in_turn_are_even_at_the_least_and_send_more() -> None:
    """So a ratio to the bound says little about shards: theirs is higher."""
    causal = problem(96, tw.causal(), kv_heads=4)
    dealt = partition((96,), 2, np.arange(97), np.arange(96) % 2)
    plan, balanced = (tw.distributed.plan(causal, ranks=2, shards=shards) for shards in (dealt, "balanced"))
    assert both(plan) == lower_bound(plan)[0]
    assert plan.imbalance <= 0.03
    assert both(plan) > 1.2 * both(balanced)


@pytest.mark.parametrize("name", masks(8))
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_even_shards_send_no_more_than_the_keys_that_are_seen(name: str, kv_heads: int) -> None:
    """Each row that a rank's queries see and that it does not hold, once: queries travel only where that saves bytes."""
    for ranks in (2, 3, 4):
        plan = tw.distributed.plan(problem(96, masks(96)[name], kv_heads=kv_heads), ranks=ranks)
        seen, held = visible(plan), [plan.token_numbers(rank) for rank in range(ranks)]
        rows = sum(len(np.setdiff1d(np.flatnonzero(seen[own].any(axis=0)), own)) for own in held)
        assert both(plan) <= rows * plan.row_bytes.route("kv")


def row_bound(plan: ContextPlan) -> int:
    """Each row that a rank's queries see and that it does not hold, once, by the cheaper route of its interval.

    An interval is a run of such keys of one other rank, of tokens that see only each other.
    """
    seen, held, bound = visible(plan), [plan.token_numbers(rank) for rank in range(plan.ranks)], 0
    query, key = plan.row_bytes.route("q"), plan.row_bytes.route("kv")
    parted = ~np.array([seen[at:, :at].any() or seen[:at, at:].any() for at in range(len(seen))])  # no pair across
    component = np.cumsum(parted)
    for own, other in itertools.permutations(held, 2):
        keys = other[seen[np.ix_(own, other)].any(axis=0)]
        new = (np.diff(keys) != 1) | (np.diff(component[keys]) != 0)
        for run in np.split(keys, np.flatnonzero(new) + 1):
            queries = int(seen[np.ix_(own, run)].any(axis=1).sum())
            bound += len(run) * (min(query, key) if queries * query < len(run) * key else key)
    return bound


@pytest.mark.parametrize("name", [name for name in masks(8) if name != "nothing"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_even_shards_send_each_row_once_by_the_cheaper_route(name: str, kv_heads: int) -> None:
    for ranks in (2, 3, 4, 8):
        plan = tw.distributed.plan(problem(96, masks(96)[name], kv_heads=kv_heads), ranks=ranks)
        assert plan.least_bytes().sent == both(plan) <= 1.05 * row_bound(plan)
        assert plan.least_bytes().rows == row_bound(plan)


@pytest.mark.parametrize("name", ["causal", "window", "documents", "selected"])
def test_the_least_bytes_are_a_minimum_cut(name: str) -> None:
    plan = tw.distributed.plan(problem(96, masks(96)[name], kv_heads=4), ranks=4)
    assert plan.least_bytes().cut == lower_bound(plan)[0]


@pytest.mark.parametrize("kind", ["uniform", "long tail", "two kinds"])
@pytest.mark.parametrize(("ranks", "longest"), [(8, 4), (64, 1), (64, 4)])
def test_long_documents_send_each_row_once_by_the_cheaper_route(kind: str, ranks: int, longest: int) -> None:
    """longest: of the documents, in shares of a rank. As many key heads as query heads: with fewer it is as above."""
    ids = document_ids(LONG, longest * LONG // ranks - 1, kind, seed=ranks)
    plan = tw.distributed.plan(long_problem(tw.causal() & tw.documents(ids), kv_heads=32), ranks=ranks)
    assert plan.imbalance <= 0.03
    assert plan.least_bytes().of_rows <= 1.05


def test_given_shards_stay_even() -> None:
    """Layers that are divided as another plan's are as even as they can be: fewest bytes alone would leave a rank with 7/4."""
    own = tw.distributed.plan(problem(96, tw.causal(), kv_heads=4), ranks=4)
    given = tw.distributed.plan(problem(96, tw.causal(), kv_heads=4), ranks=4, shards=own.shards)
    assert (given.imbalance, both(given)) == (own.imbalance, both(own))
    named = tw.distributed.plan(problem(96, tw.causal(), kv_heads=4), ranks=4, shards="head_tail")
    assert named.imbalance > 0.7 and both(named) < both(own)


@pytest.mark.parametrize("name", masks(8))
@pytest.mark.parametrize("shards", ["balanced", "zigzag"])
def test_only_what_the_works_need_travels(name: str, shards: str) -> None:
    """Given who computes what, no byte less would do: each row that a rank needs and does not hold comes once."""
    plan = tw.distributed.plan(problem(45, masks(45)[name], kv_heads=4), ranks=4, shards=shards)
    seen, sent = visible(plan), {False: 0, True: 0}
    held = [set(plan.token_numbers(rank).tolist()) for rank in range(plan.ranks)]
    need: dict[tuple[int, str], set[int]] = {}
    for stage in plan.stages:
        for rank, _, q, k, _ in stage.works:
            rows, columns = np.nonzero(seen[q.start : q.end, k.start : k.end])
            need.setdefault((rank, "q"), set()).update((rows + q.start).tolist())
            need.setdefault((rank, "kv"), set()).update((columns + k.start).tolist())
    for (rank, what), rows_needed in need.items():
        for backward in (False, True):
            row = plan.row_bytes.sent(what, backward=backward) + plan.row_bytes.returned(what, backward=backward)  # type: ignore[arg-type]
            row += plan.row_bytes.sent("out", backward=backward) if what == "q" else 0
            sent[backward] += len(rows_needed - held[rank]) * row
    assert sent == {False: plan.total_bytes(), True: plan.total_bytes(backward=True)}
    assert plan.total_bytes() == sum(plan.bytes_sent(rank) for rank in range(plan.ranks))


def test_queries_travel_where_that_is_cheaper() -> None:
    """One rank's few queries see all of another's keys."""
    ids = np.zeros(64, np.int64)
    ids[40:] = 1
    plan = tw.distributed.plan(problem(64, tw.causal() & tw.documents(ids), kv_heads=4), ranks=4, shards="contiguous")
    assert not plan.routes.by_query.all()
    table = np.zeros((8, 8), bool)
    table[7, :4] = True
    few = tw.distributed.plan(problem(64, tw.blocks(table, 8), kv_heads=4), ranks=2, shards="contiguous")
    assert {move.what for stage in few.stages for move in stage.moves} == {"q"}
    assert {move.what for stage in few.stages for move in stage.returns} == {"out"}
    biased = problem(64, tw.blocks(table, 8), kv_heads=4, bias=(1, 1, 64, 64))
    assert not tw.distributed.plan(biased, ranks=2, shards="contiguous").routes.by_query.any()
    wide = tw.distributed.plan(problem(64, tw.blocks(table.T.copy(), 8), kv_heads=4), ranks=2, shards="contiguous")
    assert {move.what for stage in wide.stages for move in stage.moves} == {"kv"}


def test_a_window_sends_a_hundredth_of_an_all_gather() -> None:
    plan = tw.distributed.plan(long_problem(tw.causal() & tw.window(1024)), ranks=8)
    assert 100 * plan.total_bytes() <= plan.tokens * 7 * plan.row_bytes.kv
    assert plan.total_bytes() == 7 * 1023 * plan.row_bytes.kv


def test_even_shards_of_many_key_heads_are_near_the_least_too() -> None:
    """Queries that travel take their work along, so balance may cost bytes; with eight queries for a key it costs few."""
    ids = document_ids(LONG, LONG // 16, "long tail")
    plan = tw.distributed.plan(long_problem(tw.causal() & tw.documents(ids), kv_heads=4), ranks=16)
    free = routes(plan.shards, plan.coverage, plan.row_bytes)
    least = sum(int(free.sent(plan.row_bytes, backward=b).sum()) for b in (False, True))
    assert least <= both(plan) <= 1.05 * least


@pytest.mark.parametrize("device", ["h200", "a100"])
def test_predicted_times(device: str) -> None:
    one, eight = (tw.distributed.plan(long_problem(tw.causal()), ranks=n, device=device) for n in (1, 8))
    for backward in (False, True):
        alone, shared = one.predict(backward=backward), eight.predict(backward=backward)
        assert alone.exposed_seconds == 0
        assert alone.seconds / 8 <= shared.seconds <= alone.seconds / 7
        assert shared.seconds == pytest.approx(shared.compute_seconds + shared.exposed_seconds)
    few = tw.distributed.plan(long_problem(tw.causal(), 8192), ranks=64, device=device, heads=1)  # over the network
    assert few.predict().exposed_seconds > 0.2 * few.predict().seconds


def test_more_stages_hide_more() -> None:
    plan = tw.distributed.plan(long_problem(tw.causal()), ranks=64, device="h200", heads=1)
    assert plan.remote_stages > 1
    assert len(plan.stages) == plan.remote_stages + 1


def test_stages_that_hide_next_to_nothing_are_left_out() -> None:
    whole = long_problem(tw.causal() & tw.window(32768), 65536, heads=16, kv_heads=4, device="cuda")
    plan = tw.distributed.plan(whole, ranks=8, device="h200", heads=1)
    spec = hardware.device("h200")
    times = {n: sum(predicted(plan.routes, whole, spec, n, backward=b).seconds for b in (False, True)) for n in (1, 2, 4)}
    assert plan.remote_stages == 2 and times[4] < times[2] < 1.005 * times[4] and times[2] < times[1]


def test_fewer_stages_are_taken_where_their_calls_fill_more_rounds() -> None:
    """Of a wide window on 8 ranks: four remote stages hide more, but each call leaves its last round of work tiles half empty."""
    spec, length = hardware.device("h200"), 65536
    for mask, stages in ((tw.causal() & tw.window(length // 4), 1), (tw.causal(), 4)):
        whole = long_problem(mask, length, heads=16, kv_heads=16, device="cuda")
        plan = tw.distributed.plan(whole, ranks=8, device=spec, heads=1)
        times = {n: sum(predicted(plan.routes, whole, spec, n, backward=b).seconds for b in (False, True)) for n in (1, 2, 4)}
        assert plan.remote_stages == stages and times[4] < times[2] < times[1]
        empty = unfilled_seconds(plan.routes, whole, spec)
        assert 90e-6 < empty < 110e-6 and min(times, key=lambda n: times[n] + n * empty) == stages


def test_long_stretches_are_shared_in_whole_tiles() -> None:
    """Of 4,096 and 8,192 tokens, so that calls have no tile that is nearly empty."""
    whole = long_problem(tw.causal(), 65536, heads=16, kv_heads=16, device="cuda")
    plan = tw.distributed.plan(whole, ranks=8, device="h200", heads=1)
    sides = {side.tokens for stage in plan.stages for work in stage.works for side in (work.q, work.k)}
    assert len(plan.routes.cuts) > len(plan.shards.bounds) and not any(size % 128 for size in sides)


@pytest.mark.parametrize("ranks", [8, 128])
def test_schedules_beside(ranks: int) -> None:
    problem = long_problem(tw.causal() & tw.window(4096), device="cuda")
    rows = {row.name: row for row in tw.distributed.compare(problem, ranks, "h200")}
    assert (*rows,) == SCHEDULES
    assert rows["Ulysses"].runs == (ranks == 8)
    assert "no multiples" in rows["Ulysses"].note or ranks == 8
    planned = rows["planned"]
    assert planned.bytes_forward is not None and rows["ring"].bytes_forward is not None
    assert planned.bytes_forward * 3 < rows["ring"].bytes_forward
    for row in rows.values():
        if row.seconds is not None and planned.seconds is not None:
            assert planned.seconds <= row.seconds * 1.001
    assert "planned" in str(show_comparison(list(rows.values())))


def test_a_plan_shows_itself() -> None:
    plan = tw.distributed.plan(long_problem(tw.causal() & tw.window(1024), device="cuda"), ranks=16, device="h200")
    text = str(plan)
    assert "128 times less than an all-gather" in text
    assert "16, balanced shards of 8192 to 8192 tokens" in text
    assert "exposed" in text and "H200" in text


def test_simulation_needs_no_torch() -> None:
    answer = fresh(
        "import tilewise as tw\n"
        "p = tw.Problem.of(heads=8, head_dim=64, seqlen=4096, mask=tw.causal(), device='cuda')\n"
        "plan = tw.distributed.plan(p, ranks=8, device='h200')\n"
        "found['text'] = str(plan)\nfound['rows'] = len(tw.distributed.compare(p, 8, 'h200'))"
    )
    assert answer["rows"] == 5
    assert loaded(answer, "torch", "triton") == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, PlanError, "pass ranks= to simulate"),
        ({"ranks": 0}, ArgumentError, "positive integer"),
        ({"ranks": 2, "shards": "even"}, ArgumentError, "need one of balanced"),
        ({"ranks": 2, "lengths": [3, 4]}, ArgumentError, "sum to 7"),
        ({"ranks": 2, "lengths": [-1, 17]}, ArgumentError, "at least 0"),
        ({"ranks": 2, "device": "h2000"}, DeviceError, "did you mean"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tw.distributed.plan(problem(16, tw.causal()), **options).predict()


def test_bad_problems() -> None:
    with pytest.raises(ArgumentError, match="self-attention"):
        tw.distributed.plan(problem(1, tw.causal(), kv_seqlen=16), ranks=2)
    with pytest.raises(ArgumentError, match="pass the lengths"):
        tw.distributed.plan(problem(16, tw.causal(), varlen=True), ranks=2)
    with pytest.raises(ArgumentError, match="tree of drafts in a packed batch"):
        tw.distributed.plan(problem(16, tw.tree(np.array([-1, 0])), varlen=True), lengths=[16], ranks=2)
    with pytest.raises(ArgumentTypeError, match="need a Problem"):
        tw.distributed.plan(tw.causal(), ranks=2)  # type: ignore[arg-type]
    plan = tw.distributed.plan(problem(16, tw.causal()), ranks=2)
    with pytest.raises(LayoutError, match="15 tokens along dim 2, the whole tensor has 16"):
        plan.shard(np.zeros((1, 1, 15)), 2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="need 0 to 1"):
        plan.area(2)
