"""Collectives of whole tensors: what `ContextPlan.unshard` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tilewise.errors import PlanError

if TYPE_CHECKING:
    from tilewise.distributed.context import ContextPlan


def unshard(plan: ContextPlan, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The whole tensor, in the order of tokens, from each rank's shard."""
    if plan.group is None and plan.ranks > 1:
        raise PlanError(f"unshard: the plan simulates {plan.ranks} ranks and has no process group; plan with one")
    whole: torch.Tensor = _Gather.apply(x.movedim(dim, 0), plan)  # type: ignore[no-untyped-call]
    return whole.movedim(0, dim)


class _Gather(torch.autograd.Function):
    """Tokens first. Shards are padded to the longest one; backward, the gradients of all ranks for a shard are summed there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: ContextPlan) -> torch.Tensor:
        ctx.plan = plan
        order = _order(plan, x.device)
        if plan.ranks == 1:
            return x[order]
        longest = int(plan.shards.tokens.max())
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: len(x)] = x
        whole = x.new_empty((plan.ranks, *padded.shape))
        torch.distributed.all_gather(list(whole), padded, group=plan.group)
        return whole.flatten(0, 1)[order]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        plan: ContextPlan = ctx.plan
        order = _order(plan, grad.device)
        if plan.ranks == 1:
            return torch.empty_like(grad).index_copy_(0, order, grad), None
        longest = int(plan.shards.tokens.max())
        padded = grad.new_zeros((plan.ranks * longest, *grad.shape[1:])).index_copy_(0, order, grad)
        own = grad.new_empty((longest, *grad.shape[1:]))
        torch.distributed.reduce_scatter(own, list(padded.split(longest)), group=plan.group)
        return own[: plan.local_tokens()], None


def _order(plan: ContextPlan, device: torch.device) -> torch.Tensor:
    """For each token of the whole tensor the row of the padded shards, one after another, that holds it."""
    key = ("order", str(device))
    order: torch.Tensor | None = plan.memory.get(key)
    if order is None:
        longest = int(plan.shards.tokens.max())
        order = torch.empty(plan.tokens, dtype=torch.int64)
        for rank in range(plan.ranks):
            numbers = torch.from_numpy(plan.token_numbers(rank))
            order[numbers] = rank * longest + torch.arange(len(numbers))
        order = plan.memory[key] = order.to(device)
    return order
