"""The loss of all ranks' tokens, and gradients averaged over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import ArgumentError, ArgumentTypeError


def mean_loss(total: Tensor, count: Tensor | int, group: Any = None) -> Tensor:
    """The mean over the tokens of all ranks: the loss that one machine with all tokens would have.

    Its value is the same on every rank. Its gradients are such that those of the parameters, averaged over the ranks as DDP,
    FSDP and `average_gradients` do, are the gradients of one machine.

    total: the sum of this rank's losses, a scalar.
    count: how many tokens it sums; an integer, or a tensor that holds one.
    group: the process group of the plan; None for the default group.

    >>> targets = plan.shift(plan.shard(labels, 1))                        # -100 where a sequence ends
    >>> total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    >>> loss = tw.distributed.mean_loss(total, (targets != -100).sum(), plan.group)
    """
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
        got = f"{total.dtype} of shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise ArgumentTypeError(f"total: got {got}, need the sum of this rank's losses, one floating-point number")
    counted = torch.as_tensor(count, device=total.device).detach().clone().reshape(())
    if counted.is_floating_point():
        raise ArgumentTypeError(f"count: got {counted.dtype}, need the number of tokens in the sum, an integer")
    dist.all_reduce(counted, group=group)
    return sum_over_ranks(total, group) / counted


def sum_over_ranks(total: Tensor, group: Any = None) -> Tensor:
    """The sum of every rank's `total`, with gradients to be averaged over the ranks."""
    summed: Tensor = _SumOverRanks.apply(total, group)  # type: ignore[no-untyped-call]
    return summed


class _SumOverRanks(torch.autograd.Function):
    """Every rank holds the whole sum and differentiates it. An average over n ranks would divide their parts by n: each is
    multiplied by n first."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, group: Any) -> Tensor:
        ctx.ranks = dist.get_world_size(group)
        summed = total.detach().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


def average_gradients(parameters: Iterable[Tensor], group: Any = None) -> None:
    """Average the gradients of a model that neither DDP nor FSDP averages. Every rank calls it with the same parameters.

    A parameter that has a gradient on some ranks only (an expert that no token of a rank chose) counts as 0 on the others.

    parameters: those of the model, in the same order on every rank.
    group: the process group of the plan; None for the default group.

    >>> loss.backward()
    >>> tw.distributed.average_gradients(model.parameters(), plan.group)
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return
    for p in trained:
        if type(p.grad) not in (type(None), Tensor) or (p.grad is not None and p.grad.is_sparse):
            raise ArgumentError(
                f"parameters: a gradient is a {type(p.grad).__name__}, need plain dense tensors; FSDP averages gradients itself"
            )
    present = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(present, dist.ReduceOp.MAX, group=group)
    ranks, waiting = dist.get_world_size(group), []
    for p, anywhere in zip(trained, present.tolist(), strict=True):
        if not anywhere:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        elif not p.grad.is_contiguous():
            p.grad = p.grad.contiguous()
        waiting.append((p.grad, dist.all_reduce(p.grad, group=group, async_op=True)))
    for grad, work in waiting:
        work.wait()
        grad.div_(ranks)
