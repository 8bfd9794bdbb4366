"""Plans: every visible pair computed once, from tokens that are there; what travels; shard and unshard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.exchange import joined_message
from tilewise.distributed.schedule import Chunk
from tilewise.distributed.shards import SHARDS
from tilewise.errors import ArgumentError
from tilewise.masks import MaskShape, allowed


def problem(tokens: int, mask: Any = None, **fields: Any) -> tw.Problem:
    return tw.Problem.of(**{"heads": 4, "kv_heads": 2, "head_dim": 8, "seqlen": tokens, "mask": mask, "dtype": "fp32"} | fields)


def ids(tokens: int, seed: int = 0, runs: int = 5) -> torch.Tensor:
    cuts = np.random.default_rng(seed).integers(0, tokens, runs)
    return torch.from_numpy(np.searchsorted(np.sort(cuts), np.arange(tokens), side="right")).int()


def masks(tokens: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(1)
    table = torch.rand(-(-tokens // 4), -(-tokens // 4), generator=rng) < 0.4
    lists = torch.tensor([[0, -1], [0, 3], [2, 0], [1, 99], [-1, -1], [11, 3]])
    return {
        "full": tw.full(),
        "causal": tw.causal(),
        "window": tw.causal() & tw.window(7),
        "two-sided": tw.window(3, 5),
        "prefix": tw.causal() | tw.prefix(9),
        "sinks": tw.causal() & (tw.window(6) | tw.prefix(2)),
        "documents": tw.causal() & tw.documents(ids(tokens)),
        "repeated documents": tw.documents(torch.arange(tokens) // 5 % 3),
        "other documents": ~tw.documents(ids(tokens)),
        "blocks": tw.causal() & tw.blocks(table, 4),
        "selected": tw.causal() & tw.selected(lists[: -(-tokens // 16)], 5, per=16),
        "dense": tw.dense(torch.rand(tokens, tokens, generator=rng) < 0.3),
        "offset": tw.causal(offset=-3),
        "nothing": tw.prefix(0),
    }


def visible(plan: ContextPlan, sequence: int = 0) -> np.ndarray[Any, Any]:
    """Booleans (queries, keys) of one sequence: seen in any batch entry by any head."""
    p = plan.problem
    if plan.lengths is None:
        return np.asarray(p.mask.to_dense(p.seqlen_q)).any(axis=(0, 1))
    at, n = int(plan.shards.starts[sequence]), plan.lengths[sequence]
    program = p.program.for_sequence(sequence, at, at + n, at, at + n)
    tile = allowed(program, MaskShape(1, 1, n, n), (0, n), (0, n), np.arange)
    seen = np.ones((n, n), bool) if tile is None else np.broadcast_to(np.asarray(tile), (1, 1, n, n))[0, 0]
    return seen


def check(plan: ContextPlan) -> None:
    """Each token held once, each visible pair computed once by a rank that has its tokens, each row sent to a rank once."""
    lengths = plan.lengths or (plan.problem.seqlen_q,)
    owner = [np.full(n, -1) for n in lengths]
    entries = 1 if plan.lengths is not None else plan.problem.batch
    for rank, chunks in enumerate(plan.chunks):
        assert list(chunks) == sorted(chunks)
        for chunk in chunks:
            assert (owner[chunk.sequence][chunk.start : chunk.end] == -1).all()
            owner[chunk.sequence][chunk.start : chunk.end] = rank
    assert all((held >= 0).all() for held in owner)
    times = [np.zeros((n, n), int) for n in lengths]
    got: set[tuple[int, str, int, int]] = set()
    for number, stage in enumerate(plan.stages):
        assert number or not stage.moves
        here: dict[tuple[int, str], list[Chunk]] = {}
        for source, target, what, chunk in stage.moves:
            assert source != target
            assert (owner[chunk.sequence][chunk.start : chunk.end] == source).all()
            rows = {(target, what, chunk.sequence, t) for t in range(chunk.start, chunk.end)}
            assert not rows & got
            got |= rows
            here.setdefault((target, what), []).append(chunk)
        for rank, q_rank, q, k, area in stage.works:
            holds = [np.zeros(n, bool) for n in lengths], [np.zeros(n, bool) for n in lengths]
            for side, what in zip(holds, ("q", "kv"), strict=True):
                for chunk in here.get((rank, what), ()):
                    side[chunk.sequence][chunk.start : chunk.end] = True
            own_q, own_k = owner[q.sequence] == rank, owner[k.sequence] == rank
            qs = own_q if q_rank == rank else holds[0][q.sequence]
            ks = own_k if number == 0 or q_rank != rank else holds[1][k.sequence]
            assert qs[q.start : q.end].all() and ks[k.start : k.end].all()
            assert (owner[q.sequence][q.start : q.end] == q_rank).all()
            assert q.sequence == k.sequence
            seen = visible(plan, q.sequence)[q.start : q.end, k.start : k.end]
            assert seen[0].any() and seen[-1].any()
            assert area == seen.sum() * entries
            times[q.sequence][q.start : q.end, k.start : k.end] += seen
    assert sum(plan.area(rank) for rank in range(plan.ranks)) == sum(w.area for s in plan.stages for w in s.works)
    for sequence in range(len(lengths)):
        assert (times[sequence] == visible(plan, sequence)).all()


def staged(plan: ContextPlan, remote: int) -> ContextPlan:
    """The same plan with so many remote stages."""
    again = replace(plan)
    again.__dict__["remote_stages"] = remote
    return again


@pytest.mark.parametrize("name", masks(8))
@pytest.mark.parametrize(("tokens", "ranks"), [(20, 1), (37, 3), (29, 4), (3, 5)])
def test_every_visible_pair_is_computed_once(name: str, tokens: int, ranks: int) -> None:
    for shards, heads in zip(SHARDS, (4, 2, 1, 4), strict=True):
        mask = masks(tokens)[name]
        plan = tw.distributed.plan(problem(tokens, mask, kv_heads=heads), ranks=ranks, shards=shards)
        assert plan.shards.tokens.max() - plan.shards.tokens.min() <= 1
        for remote in (1, 3):
            check(staged(plan, remote))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_lengths_ranks_and_masks(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 24), min_size=1, max_size=4))
    tokens = sum(lengths)
    window = data.draw(st.integers(1, 12))
    kinds = [tw.causal(), tw.full(), tw.window(window, 2), tw.causal() & tw.window(window), tw.causal() | tw.prefix(window)]
    mask = data.draw(st.sampled_from(kinds))
    if tokens and data.draw(st.booleans()):
        mask = mask & tw.documents(torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens))))
    heads = data.draw(st.sampled_from([1, 4]))
    shards = data.draw(st.sampled_from(SHARDS))
    whole = problem(tokens, mask, kv_heads=heads, varlen=True)
    check(tw.distributed.plan(whole, lengths=lengths, ranks=data.draw(st.integers(1, 5)), shards=shards))


@pytest.mark.parametrize("mask", [tw.causal(), tw.full(), tw.causal() & tw.window(5), tw.causal() | tw.prefix(3)])
def test_packed_sequences_are_kept_apart(mask: tw.Mask) -> None:
    plan = tw.distributed.plan(problem(60, mask, varlen=True), lengths=[11, 0, 29, 1, 19], ranks=3, shards="contiguous")
    check(plan)
    assert plan.positions(0).tolist() == [*range(11), *range(9)]


def test_ids_are_kept_by_value() -> None:
    numbers = torch.arange(64, dtype=torch.int32) // 32
    plan = tw.distributed.plan(problem(64, tw.documents(numbers)), ranks=2)
    numbers.zero_()
    assert plan.total_bytes() == 0
    assert plan.problem.program.tensors[0].max() == 1
    check(plan)


def test_shards_and_positions() -> None:
    plan = tw.distributed.plan(problem(10, tw.causal()), ranks=3, shards="contiguous")
    x = torch.randn(2, 10, 3, requires_grad=True)
    assert torch.equal(torch.cat([plan.shard(x, 1, rank=r) for r in range(3)], 1), x)
    plan.shard(x, 1, rank=1).sum().backward()
    assert x.grad is not None
    assert x.grad[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]
    assert plan.positions(1).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_teams_share_heads(name: str) -> None:
    plan = tw.distributed.plan(problem(53, masks(53)[name]), ranks=6, heads=2)
    teams = plan.of_teams
    check(teams)
    assert (teams.ranks, teams.problem.heads, teams.problem.kv_heads) == (3, 2, 1)
    assert plan.shards.tokens.max() - plan.shards.tokens.min() <= 1
    for rank in range(6):  # a team's tokens are those of its members, in order
        members = [plan.token_numbers(2 * (rank // 2) + member) for member in range(2)]
        assert np.concatenate(members).tolist() == teams.token_numbers(rank // 2).tolist()
    assert plan.stages is teams.stages
    assert sum(plan.area(rank) for rank in range(6)) == pytest.approx(sum(map(teams.area, range(3))), abs=6)
    assert plan.total_bytes() > 2 * teams.total_bytes()
    alone = tw.distributed.plan(problem(53, masks(53)[name]), ranks=2, heads=2)  # all-to-all, and nothing else
    assert len(alone.stages) == 1
    row = alone.row_bytes
    assert alone.total_bytes() == 53 * (row.q + row.kv + row.out) // 2
    assert alone.total_bytes(backward=True) == alone.total_bytes()


def test_teams_are_made_where_they_are_faster() -> None:
    many = problem(1 << 16, tw.causal(), heads=32, kv_heads=8, head_dim=128, dtype="bf16", device="cuda")
    assert tw.distributed.plan(many, ranks=64, device="h200").heads == 8  # one node
    assert tw.distributed.plan(replace(many, mask=tw.window(64)), ranks=8, device="h200").heads == 1
    assert tw.distributed.plan(replace(many, bias=(1, 1, 1 << 16, 1 << 16)), ranks=64, device="h200").heads == 1
    assert tw.distributed.plan(replace(many, device="cpu"), ranks=64).heads == 1
    wide = replace(many, kv_heads=16, heads=16, mask=tw.causal() & tw.window(1 << 14))
    plans = {share: tw.distributed.plan(wide, ranks=8, device="h200", heads=share) for share in (None, 1, 8)}
    times = {share: sum(plan.predict(backward=b).seconds for b in (False, True)) for share, plan in plans.items()}
    assert plans[None].heads == 8 and times[8] < 1.002 * times[1]  # as fast, and one call of a rank, which merges nothing
    with pytest.raises(ArgumentError, match="heads: got 3, need one of 1, 2, 4, 8"):
        tw.distributed.plan(many, ranks=64, heads=3)


def test_bytes_of_a_window() -> None:
    plan = tw.distributed.plan(problem(64, tw.causal() & tw.window(5)), ranks=4, shards="contiguous")
    row = 2 * 2 * 8 * 4
    assert [plan.bytes_sent(r) for r in range(4)] == [4 * row, 4 * row, 4 * row, 0]
    assert [plan.bytes_sent(r, backward=True) for r in range(4)] == [4 * row, 8 * row, 8 * row, 4 * row]


def test_messages_have_no_gaps() -> None:
    """As process groups want them; one token of each head would otherwise be sent as it lies among the others."""
    lse = torch.arange(12.0).reshape(1, 3, 4)
    for tensors in ([lse[:, :, :1]], [lse[:, :, :1], lse[:, :, 1:]]):
        message = joined_message(tensors)
        assert message.is_contiguous()
        assert message.tolist() == torch.cat([x.flatten() for x in tensors]).tolist()
