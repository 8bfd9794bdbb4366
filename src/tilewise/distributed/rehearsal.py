"""All ranks of a plan in turn on one device: each runs its own passes, and messages are kept in the place of being sent.

A rank that runs before another has written its message reads zeros. What a message needs is right a round before it, so after a
few rounds all of them are those of real ranks, and so are the results. From then on every pass of a rank can be run, and timed,
alone: it makes the kernel calls that it would make among real ranks, with the same data.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.distributed.call import attend
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.exchange import Incoming, Link, Outgoing, joined_message, parted_message
from tilewise.distributed.segments import Call, Local

SETTLED, SETTLED_HEADS = 5, 7
"""Rounds until results are right: k, v and q; out and lse; what goes with q; gradients on their way home; and one to read them.
Where heads are shared, one before and one after that."""


class KeptLink(Link):
    """Messages stay in a box, by the number of the exchange and the ranks of both ends."""

    def start(self, label: str, outgoing: Outgoing, incoming: Incoming, dtype: torch.dtype, device: torch.device) -> Any:
        self.counter.exchanges += 1
        for peer, tensors in outgoing.items():
            message = joined_message(tensors)
            self.counter.sent += message.numel() * message.element_size()
            self.group[self.counter.exchanges, self.own, self.of(peer)] = message
        return _Kept(self, self.counter.exchanges, incoming, dtype, device)


class _Kept(NamedTuple):
    link: KeptLink
    exchange: int
    incoming: Incoming
    dtype: torch.dtype
    device: torch.device

    def wait(self) -> dict[int, list[Tensor]]:
        found = {}
        for peer, shapes in self.incoming.items():
            message = self.link.group.get((self.exchange, self.link.of(peer), self.link.own))
            if message is None:
                found[peer] = [torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes]
            else:
                found[peer] = parted_message(message, shapes)
        return found


@dataclass(eq=False)
class Rank:
    """One rank: its call, its tensors, and what its last passes gave."""

    call: Call
    link: KeptLink
    leaves: tuple[Tensor, ...]
    dout: Tensor
    results: tuple[Tensor, ...] = ()
    grads: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        self.link.counter.exchanges = self.link.counter.sent = 0
        self.results = attend(self.call, self.link, Local(*self.leaves))

    def backward(self) -> None:
        """After a forward, once."""
        self.grads = torch.autograd.grad(self.results[0], self.leaves, self.dout)


@dataclass(eq=False)
class Rehearsal:
    """The ranks of a simulated plan, ready to run.

    plan: of a problem without bias, ALiBi, sinks and dropout.
    q, k, v, dout: whole, (B, H, S, D), or (1, H, tokens, D) where the plan has `lengths`; on one device.
    kind: of call; one that watches its kernels, say.
    """

    plan: ContextPlan
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    backend: str = "auto"
    kind: type[Call] = Call
    ranks: list[Rank] = field(init=False)

    def __post_init__(self) -> None:
        box: dict[tuple[int, int, int], Tensor] = {}
        plan, device = self.plan, self.q.device
        problem = replace(plan.problem, needs_grad=True, device=device.type)
        self.ranks = []
        for number in range(plan.ranks):
            own = plan.as_rank(number)
            leaves = tuple(own.shard(x, 2).requires_grad_() for x in (self.q, self.k, self.v))
            call = self.kind(own, problem, self.backend, device)
            self.ranks.append(Rank(call, KeptLink(box, number), leaves, own.shard(self.dout, 2)))

    def settle(self) -> None:
        """Rounds until all messages and results are right."""
        for _ in range(SETTLED if self.plan.heads == 1 else SETTLED_HEADS):
            for rank in self.ranks:
                rank.forward()
                rank.backward()

    def results(self) -> tuple[Tensor, ...]:
        """out, dq, dk and dv of the whole."""
        order = torch.cat([torch.from_numpy(self.plan.token_numbers(rank)) for rank in range(self.plan.ranks)])
        order = order.to(self.q.device)
        found = []
        for parts in zip(*((rank.results[0].detach(), *rank.grads) for rank in self.ranks), strict=True):
            together = torch.cat(parts, 2)
            found.append(torch.empty_like(together).index_copy_(2, order, together))
        return tuple(found)
