"""Works that are one call: every visible pair is in one of them, and no other pair; there are few; what they need has come."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.distributed.test_plan import ids, masks, problem, visible
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.coverage import coverage, on_host
from tilewise.distributed.joins import GRAIN, Block, Rounds, Seen, joined_blocks
from tilewise.distributed.order import own_order
from tilewise.distributed.schedule import Chunk, Work
from tilewise.distributed.segments import SIDE_BY_SIDE, Call, Local, Segment
from tilewise.distributed.shards import filled
from tilewise.masks import MaskShape, allowed
from tilewise.masks.restrict import ordered

WIDE = {
    "wide window": tw.causal() & tw.window(40),
    "wide two-sided": tw.window(30, 20),
    "narrow": tw.window(3, 2),
}


def segments(plan: ContextPlan, rank: int) -> list[list[Segment]]:
    """The calls of a rank by stage."""
    whole = plan.problem
    own = plan.as_rank(rank)
    batch = 1 if plan.lengths is not None else whole.batch
    local = Local(*(torch.zeros(batch, heads, own.local_tokens(), 8) for heads in (whole.heads, *[whole.kv_heads] * 2)))
    call = Call(own, whole, "auto", torch.device("cpu"))
    return [call.segments(local, stage) for stage in range(len(plan.stages))]


def tokens(plan: ContextPlan, chunks: tuple[Chunk, ...]) -> np.ndarray[Any, Any]:
    starts = plan.shards.starts
    return np.concatenate([np.arange(c.start, c.end) + starts[c.sequence] for c in chunks])


def computed(plan: ContextPlan) -> np.ndarray[Any, Any]:
    """How often each pair of the whole is computed."""
    count = np.zeros((plan.tokens, plan.tokens), int)
    for rank in range(plan.ranks):
        for stage in segments(plan, rank):
            for segment in stage:
                q, k = tokens(plan, segment.block.q), tokens(plan, segment.block.k)
                n, m = len(q), len(k)
                assert (segment.problem.seqlen_q, segment.problem.seqlen_k) == (n, m)
                tile = allowed(on_host(segment.problem.program), MaskShape(1, 4, n, m), (0, n), (0, m), np.arange)
                seen = np.ones((n, m), bool) if tile is None else np.broadcast_to(np.asarray(tile), (1, 4, n, m)).any(axis=(0, 1))
                np.add.at(count, np.ix_(q, k), seen)  # a key may be in two groups
    return count


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("name", [*masks(96), *WIDE])
def test_each_visible_pair_is_in_one_call(name: str, kv_heads: int) -> None:
    mask = (masks(96) | WIDE)[name]
    for ranks, shards in ((2, "balanced"), (3, "contiguous"), (3, "zigzag"), (8, "balanced")):
        plan = tw.distributed.plan(problem(96, mask, kv_heads=kv_heads), ranks=ranks, shards=shards)
        assert (computed(plan) == visible(plan)).all(), (ranks, shards)


@pytest.mark.parametrize("mask", [tw.causal(), tw.causal() & tw.window(11)], ids=["causal", "window"])
def test_packed_sequences(mask: tw.Mask) -> None:
    lengths = (31, 0, 40, 25)
    for ranks in (3, 4, 8):
        plan = tw.distributed.plan(problem(96, mask, varlen=True, batch=4), lengths=lengths, ranks=ranks)
        count, starts = computed(plan), [0, 31, 31, 71, 96]
        for number, (start, end) in enumerate(pairwise(starts)):
            assert (count[start:end, start:end] == visible(plan, number)).all()
        assert count.sum() == sum(visible(plan, number).sum() for number in range(4))


@pytest.mark.parametrize("fields", [{"dropout_p": 0.1}, {"alibi": True}], ids=["dropout", "alibi"])
@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_where_positions_count_calls_are_rectangles(name: str, fields: dict[str, Any]) -> None:
    plan = tw.distributed.plan(problem(96, masks(96)[name], **fields), ranks=4)
    assert (computed(plan) == visible(plan)).all()
    blocks = [s.block for rank in range(4) for stage in segments(plan, rank) for s in stage]
    assert all(len(block.q) == len(block.k) == 1 for block in blocks)


def test_what_a_call_needs_is_own_or_came_in_its_stage() -> None:
    for mask in (tw.causal(), masks(96)["two-sided"], masks(96)["documents"], *WIDE.values()):
        for kv_heads in (4, 1):
            plan = tw.distributed.plan(problem(96, mask, kv_heads=kv_heads), ranks=4)
            for rank in range(4):
                own = set(plan.token_numbers(rank).tolist())
                for stage, calls in zip(plan.stages, segments(plan, rank), strict=True):
                    for what, side in (("q", "q"), ("kv", "k")):
                        came = {t for m in stage.received_by(rank, what) for t in tokens(plan, (m.chunk,)).tolist()}  # type: ignore[arg-type]
                        for segment in calls:
                            assert {*tokens(plan, getattr(segment.block, side)).tolist()} <= own | came


def test_a_window_over_many_ranks_takes_two_calls_a_rank_and_merges_little() -> None:
    """Rows that see keys of another rank wait for these; with queries that travel, as many own rows go with them."""
    mask = tw.causal() & tw.window(1024)
    for kv_heads in (4, 1):
        plan = tw.distributed.plan(problem(65536, mask, kv_heads=kv_heads), ranks=8, device="h200", heads=1)
        for rank in range(1, 7):
            (first,), (late,) = segments(plan, rank)
            assert 6 * 1024 <= first.problem.seqlen_q <= 7 * 1024 and first.problem.seqlen_q % GRAIN == 0
            assert first.problem.seqlen_q + late.problem.seqlen_q == 8192 + 1023 * (kv_heads == 4)
            assert late.first and late.block.travels == (kv_heads == 4)


def test_as_many_rows_are_late_as_fill_the_rounds_of_a_device() -> None:
    """On the 132 units of an H200 both calls of a window end with rounds of work tiles that are nearly full."""
    mask = tw.causal() & tw.window(1024)
    whole = tw.Problem.of(heads=16, seqlen=65536, head_dim=128, mask=mask, device="cuda")
    plan = tw.distributed.plan(whole, ranks=8, device="h200", heads=1)
    seen = Seen(plan.coverage, plan.shards)
    rounds = Rounds(seen, 132, 16)
    for rank in range(7):
        blocks = [segment.block for stage in segments(plan, rank) for segment in stage]
        even = sum(16 * sum(n + 1 for n in seen.visits(b.q[0], b.k[0])) / 132 for b in blocks)
        assert len(blocks) == 2 and sum(map(rounds.length, blocks)) <= 1.03 * even, rank


def test_rounds_are_those_of_the_longest_unit() -> None:
    """Four units and three heads of a causal mask, whose work tiles visit 1, 2, 3 and 4 tiles of keys and cost one more."""
    plan = tw.distributed.plan(problem(4 * GRAIN, tw.causal()), ranks=1)
    seen, whole = Seen(plan.coverage, plan.shards), Chunk(0, 0, 4 * GRAIN)
    block = Block((whole,), (whole,), 0, travels=False)
    assert seen.visits(whole, whole) == [1, 2, 3, 4]
    assert seen.visits(Chunk(0, 1, 4 * GRAIN), whole) == [2, 3, 4, 4]
    assert seen.visits(Chunk(0, GRAIN, 3 * GRAIN), Chunk(0, 3 * GRAIN, 4 * GRAIN)) == [0, 0]
    assert Rounds(seen, 4, 3).length(block) == 11 and Rounds(seen, 12, 3).length(block) == 5


def test_documents_of_own_tokens_are_known_to_see_themselves() -> None:
    """Ids of queries and of keys are one tensor there, so kernels need not ask which keys no query sees."""
    mask = tw.causal() & tw.documents(ids(4096))
    plan = tw.distributed.plan(problem(4096, mask, kv_heads=4), ranks=8)
    own = [segment.problem.program for rank in range(8) for segment in segments(plan, rank)[0]]
    with_ids = [program for program in own if program.tensors]
    assert with_ids and all(q_ids is k_ids for q_ids, k_ids in (program.tensors for program in with_ids))


def test_own_tokens_of_a_wide_window_are_one_call() -> None:
    """Tokens see all that came before them in their chunk, and all of an earlier chunk or nothing. Else calls are apart."""
    mask = tw.causal() & tw.window(16384)
    whole = tw.Problem.of(heads=16, seqlen=65536, head_dim=128, mask=mask, device="cuda")
    plan = tw.distributed.plan(whole, ranks=8, device="h200", heads=1)
    assert all(len(chunks) > 1 for chunks in plan.chunks[:7])
    own = [segments(plan, rank)[0] for rank in range(7)]
    assert {len(calls) for calls in own} == {1}
    assert {calls[0].problem.program.structure for calls in own} == {"b", "bd"}
    assert all(program.tensors[0] is program.tensors[1] for (s,) in own if (program := s.problem.program).tensors)
    near = tw.distributed.plan(problem(96, tw.causal() & tw.window(9), kv_heads=4), ranks=4, shards="zigzag")
    assert len(segments(near, 1)[0]) > 1


@pytest.mark.parametrize("mask", [tw.window(31, 31), tw.causal() & tw.window(32), tw.causal() & tw.window(50)])
def test_what_order_says_is_what_is_seen(mask: tw.Mask) -> None:
    """Of any tokens: where there is an order, they see just that of each other."""
    plan = tw.distributed.plan(problem(96, mask), ranks=1)
    seen, rng, found = visible(plan), np.random.default_rng(0), 0
    for _ in range(200):
        ends = np.sort(rng.choice(97, 4, replace=False))
        picked = np.concatenate([np.arange(*ends[:2]), np.arange(*ends[2:])])
        order = own_order(plan.problem.program, plan.coverage, picked)
        if order is not None:
            program, n = ordered(torch.from_numpy(order.group), order.causal), len(picked)
            tile = allowed(on_host(program), MaskShape(1, 1, n, n), (0, n), (0, n), np.arange)
            one = np.ones((n, n), bool) if tile is None else np.broadcast_to(np.asarray(tile), (1, 1, n, n))[0, 0]
            assert (one == seen[np.ix_(picked, picked)]).all()
            found += 1
    assert found


def test_causal_stages_are_few_calls() -> None:
    plan = tw.distributed.plan(problem(65536, tw.causal(), kv_heads=4), ranks=8, device="h200", heads=1)
    for rank in range(8):
        calls = segments(plan, rank)
        assert sum(map(len, calls)) <= 8 < sum(len(stage.works_of(rank)) for stage in plan.stages)
        assert all(s.problem.program.structure == "" for stage in calls[1:] for s in stage)


def test_documents_of_one_rectangle_need_no_ids() -> None:
    plan = tw.distributed.plan(problem(4096, tw.causal() & tw.documents(ids(4096)), kv_heads=4), ranks=8)
    remote = [s for rank in range(8) for stage in segments(plan, rank)[1:] for s in stage]
    assert remote and all(not s.problem.program.tensors for s in remote)


@pytest.mark.parametrize("name", ["causal", "documents", "sinks"])
def test_small_calls_stand_side_by_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [problem(96, masks(96)[name], kv_heads=kv) for kv in (4, 1)]
    shards = filled((96,), 8, coverage(problems[0]))
    plans = [tw.distributed.plan(whole, ranks=8, shards=shards) for whole in problems]
    apart = [sum(len(stage) for rank in range(8) for stage in segments(plan, rank)) for plan in plans]
    monkeypatch.setitem(SIDE_BY_SIDE, "cpu", 1 << 20)
    together = [[stage for rank in range(8) for stage in segments(plan, rank)] for plan in plans]
    assert any(s.block.groups for stages in together for stage in stages for s in stage)
    assert sum(len(stage) for stages in together for stage in stages) < sum(apart)
    for plan in plans:
        assert (computed(plan) == visible(plan)).all()


def test_those_side_by_side_that_fill_tiles_come_first() -> None:
    whole = tw.distributed.plan(problem(4096, tw.full(), kv_heads=4), ranks=2)
    sizes = [(100, 256), (256, 256), (256, 100)]
    ends = np.cumsum([(0, 0), *sizes], axis=0).tolist()
    blocks = [
        Block((Chunk(0, q, q + rows),), (Chunk(0, k, k + keys),), rows * keys, travels=True)
        for (q, k), (rows, keys) in zip(ends, sizes, strict=False)
    ]
    seen = Seen(whole.coverage, whole.shards)
    first = Work(0, 0, Chunk(0, 0, 1), Chunk(0, 0, 1), 1)
    works = [Work(0, 1, *block.q, *block.k, block.area) for block in blocks]
    _, (joined,) = joined_blocks([[first], works], seen, lambda block: True, small=1 << 20)
    assert joined.groups == ((256, 256), (256, 100), (100, 256))
