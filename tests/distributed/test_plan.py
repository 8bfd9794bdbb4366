"""Plans: every visible pair computed once, from tokens that are there; what travels; shard and unshard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.schedule import Chunk


def problem(tokens: int, mask: Any = None, **fields: Any) -> tw.Problem:
    return tw.Problem.of(**{"heads": 4, "kv_heads": 2, "head_dim": 8, "seqlen": tokens, "mask": mask, "dtype": "fp32"} | fields)


def ids(tokens: int, seed: int = 0, runs: int = 5) -> torch.Tensor:
    cuts = np.random.default_rng(seed).integers(0, tokens, runs)
    return torch.from_numpy(np.searchsorted(np.sort(cuts), np.arange(tokens), side="right")).int()


def masks(tokens: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(1)
    table = torch.rand(-(-tokens // 4), -(-tokens // 4), generator=rng) < 0.4
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
    from tilewise.masks import MaskShape, allowed

    program = p.program.for_sequence(sequence, at, at + n, at, at + n)
    tile = allowed(program, MaskShape(1, 1, n, n), (0, n), (0, n), torch.arange)
    seen = np.ones((n, n), bool) if tile is None else np.broadcast_to(np.asarray(tile), (1, 1, n, n))[0, 0]
    return seen


def check(plan: ContextPlan) -> None:
    """Each token held once, each visible pair computed once by a rank that has its tokens, each row sent to a rank once."""
    lengths = plan.lengths or (plan.problem.seqlen_q,)
    owner = [np.full(n, -1) for n in lengths]
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
            assert area > 0
            times[q.sequence][q.start : q.end, k.start : k.end] += seen
    for sequence in range(len(lengths)):
        assert (times[sequence] == visible(plan, sequence)).all()


@pytest.mark.parametrize("name", masks(8))
@pytest.mark.parametrize(("tokens", "ranks"), [(64, 1), (61, 3), (40, 4), (3, 5)])
def test_every_visible_pair_is_computed_once(name: str, tokens: int, ranks: int) -> None:
    check(tw.distributed.plan(problem(tokens, masks(tokens)[name]), ranks=ranks, shards="contiguous"))


@pytest.mark.parametrize("mask", [tw.causal(), tw.full(), tw.causal() & tw.window(5), tw.causal() | tw.prefix(3)])
def test_packed_sequences_are_kept_apart(mask: tw.Mask) -> None:
    plan = tw.distributed.plan(problem(60, mask, varlen=True), lengths=[11, 0, 29, 1, 19], ranks=3, shards="contiguous")
    check(plan)
    assert plan.positions(0).tolist() == [*range(11), *range(9)]


def test_shards_and_positions() -> None:
    plan = tw.distributed.plan(problem(10, tw.causal()), ranks=3, shards="contiguous")
    x = torch.randn(2, 10, 3, requires_grad=True)
    assert torch.equal(torch.cat([plan.shard(x, 1, rank=r) for r in range(3)], 1), x)
    plan.shard(x, 1, rank=1).sum().backward()
    assert x.grad is not None
    assert x.grad[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]
    assert plan.positions(1).tolist() == [3, 4, 5, 6]


def test_bytes_of_a_window() -> None:
    plan = tw.distributed.plan(problem(64, tw.causal() & tw.window(5)), ranks=4, shards="contiguous")
    row = 2 * 2 * 8 * 4
    assert [plan.bytes_sent(r) for r in range(4)] == [4 * row, 4 * row, 4 * row, 0]
    assert [plan.bytes_sent(r, backward=True) for r in range(4)] == [4 * row, 8 * row, 8 * row, 4 * row]
