"""Labels of the next token where tokens are divided over ranks: the token after a rank's last one is another rank's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError, PlanError

if TYPE_CHECKING:
    from tilewise.distributed.context import ContextPlan


def next_labels(labels: Tensor, lengths: Sequence[int], dim: int = -1, ignore_index: int = -100) -> Tensor:
    """For each token of whole sequences the label of the one after it, and `ignore_index` where a sequence ends.

    labels: integers, one for each token along `dim`, where sequences of these lengths stand one after another.
    """
    _check(labels, ignore_index)
    tokens = labels.movedim(dim, -1)
    moved = torch.full_like(tokens, ignore_index)
    moved[..., :-1] = tokens[..., 1:]
    ends = np.cumsum(lengths)[np.asarray(lengths) > 0] - 1
    moved[..., torch.from_numpy(ends).to(labels.device)] = ignore_index
    return moved.movedim(-1, dim)


def shift(plan: ContextPlan, labels: Tensor, dim: int = -1, ignore_index: int = -100) -> Tensor:
    """For each of this rank's tokens the label of the token after it, whoever holds that; see `ContextPlan.shift`."""
    _check(labels, ignore_index)
    if not -labels.ndim <= dim < labels.ndim:
        raise LayoutError(f"dim: got {dim}, labels have {labels.ndim} dimensions")
    shards = plan.shards
    size, own, whole = labels.shape[dim], plan.local_tokens(), plan.tokens
    if size == whole:
        return plan.shard(next_labels(labels, shards.lengths, dim, ignore_index), dim)
    if size != own:
        raise LayoutError(
            f"labels: {size} tokens along dim {dim} of shape {tuple(labels.shape)}, need {own}, this rank's, or {whole}, all"
        )
    if int(shards.tokens.max()) == whole:  # one rank holds everything, and needs nobody
        return labels.clone()
    if plan.group is None:
        raise PlanError(
            f"shift: the plan simulates {plan.ranks} ranks, whose labels cannot be had; pass those of all {whole} tokens"
        )
    return _shift_shard(plan, labels.movedim(dim, -1), ignore_index).movedim(-1, dim)


def _shift_shard(plan: ContextPlan, mine: Tensor, ignore_index: int) -> Tensor:
    """`shift` of this rank's labels, tokens last: within a piece of the shard by one, and at its end from the next piece."""

    def index(numbers: Any) -> Tensor:
        return torch.from_numpy(numbers).to(mine.device)

    shards = plan.shards
    pieces = np.flatnonzero(shards.rank == plan.rank)  # in the order of the shard
    sizes = np.diff(shards.bounds)
    starts = np.cumsum(sizes[pieces]) - sizes[pieces]
    firsts = _first_labels(plan, mine[..., index(starts)], ignore_index)
    moved = torch.full_like(mine, ignore_index)
    moved[..., :-1] = mine[..., 1:]
    past = shards.bounds[pieces + 1]
    inside = ~np.isin(past, np.cumsum(shards.lengths))  # the sequence goes on in the next piece
    last = starts + sizes[pieces] - 1
    moved[..., index(last)] = ignore_index
    moved[..., index(last[inside])] = firsts[..., index(pieces[inside] + 1)]
    return moved


def _first_labels(plan: ContextPlan, firsts: Tensor, ignore_index: int) -> Tensor:
    """The first label of every piece, of all ranks: (…, pieces), from those of this rank's pieces. Every rank takes part."""
    rank = plan.shards.rank
    counts = np.bincount(rank, minlength=plan.ranks)
    sent = firsts.new_full((*firsts.shape[:-1], int(counts.max())), ignore_index)
    sent[..., : firsts.shape[-1]] = firsts
    received = [torch.empty_like(sent) for _ in range(plan.ranks)]
    dist.all_gather(received, sent, group=plan.group)
    order = np.argsort(np.argsort(rank, kind="stable"))  # of each piece among all, ranks one after another
    held = torch.cat([part[..., :count] for part, count in zip(received, counts.tolist(), strict=True)], dim=-1)
    return held[..., torch.from_numpy(order).to(firsts.device)]


def _check(labels: Tensor, ignore_index: int) -> None:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ArgumentTypeError(f"labels: got {labels.dtype}, need integers")
    info = torch.iinfo(labels.dtype)
    if not info.min <= ignore_index <= info.max:
        raise ArgumentError(f"ignore_index: {ignore_index} does not fit into labels of {labels.dtype}; pass labels.long()")
