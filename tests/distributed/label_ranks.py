"""What the ranks of tests/distributed/test_shift.py do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tilewise as tw
from tilewise.distributed import average_gradients, mean_loss, plan
from tilewise.distributed.shards import partition


def planned(group: Any, lengths: tuple[int, ...], cuts: list[int] | None, owners: list[int] | None, **how: Any) -> Any:
    """A plan of packed sequences, with any shards: cuts of the tokens and the rank of each piece."""
    import numpy as np

    problem = tw.Problem.of(heads=2, head_dim=8, seqlen=sum(lengths), mask=tw.causal())
    if cuts is None:
        return plan(problem, group, lengths=lengths, **how)
    ranks = how.get("ranks") or dist.get_world_size(group)
    shards = partition(lengths, ranks, np.array(cuts), np.array(owners))
    return plan(problem, group, lengths=lengths, shards=shards, **how)


def shifted(group: Any, jobs: list[tuple[Any, ...]], labels: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """By both ways: from this rank's labels, and from all."""
    found = []
    for (lengths, cuts, owners), whole in zip(jobs, labels, strict=True):
        made = planned(group, lengths, cuts, owners)
        found.append((made.shift(made.shard(whole, 1), 1), made.shift(whole, 1)))
    return found


def learn(group: Any, steps: int, lengths: tuple[int, ...]) -> tuple[list[float], Tensor]:
    """A linear model that is trained on its rank's tokens only, some of which have no label."""
    rank = dist.get_rank(group)
    torch.manual_seed(3)
    tokens, targets = torch.randn(sum(lengths), 6, dtype=torch.float64), torch.randint(0, 5, (sum(lengths),))
    targets[::4] = -100
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    unused = torch.zeros(3, requires_grad=True)
    made, losses = planned(group, lengths, None, None), []
    assert made.rank == rank
    for _ in range(steps):
        ours = made.shift(made.shard(targets, 0), 0)
        total = torch.nn.functional.cross_entropy(made.shard(tokens, 0) @ weight, ours, reduction="sum")
        loss = mean_loss(total, (ours != -100).sum(), group)
        loss.backward()
        average_gradients([weight, unused], group)
        losses.append(loss.item())
        with torch.no_grad():
            weight -= 0.1 * weight.grad  # type: ignore[operator]
            weight.grad = None
    assert unused.grad is None
    return losses, weight.detach()


def gradients_of_some_ranks(group: Any) -> list[float]:
    """A parameter that only rank 0 used."""
    p = torch.ones(2, requires_grad=True)
    if dist.get_rank(group) == 0:
        p.grad = torch.full((2,), 4.0)
    average_gradients([p], group)
    assert p.grad is not None
    return list(p.grad.tolist())
