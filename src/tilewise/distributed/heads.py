"""Ranks that share heads: an all-to-all among neighbours before attention, and the other way after it.

A plan with `heads` u makes teams of u neighbouring ranks. Between the two exchanges each member has the tokens of its whole team,
and one part in u of the heads; the ranks with the same part, one of each team, run a plan over the sequence. With one team
that is attention without any further exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.distributed.context import ContextPlan
from tilewise.distributed.exchange import Link
from tilewise.distributed.pieces import TOKENS

HEADS = 1
"""The side of a tensor (B, H, S, …) that counts heads."""


@dataclass(frozen=True, eq=False)
class Team:
    """The team of this rank."""

    plan: ContextPlan
    link: Link
    device: torch.device

    @property
    def size(self) -> int:
        return self.plan.heads

    @property
    def number(self) -> int:
        """Which team of all."""
        return self.plan.rank // self.size

    @property
    def member(self) -> int:
        """Which member of it this rank is, and which part of the heads it has."""
        return self.plan.rank % self.size

    @property
    def others(self) -> list[int]:
        return [member for member in range(self.size) if member != self.member]

    @property
    def plan_of_teams(self) -> ContextPlan:
        """The plan over the sequence: its ranks are the teams."""
        return self.plan.of_teams

    @cached_property
    def link_of_teams(self) -> Link:
        """To the ranks of other teams that have the same heads."""
        return self.link.within([team * self.size + self.member for team in range(self.plan.ranks // self.size)])

    @cached_property
    def link_of_members(self) -> Link:
        return self.link.within([self.number * self.size + member for member in range(self.size)])

    @cached_property
    def places(self) -> list[Tensor]:
        """Where the tokens of each member stand among those of the team."""
        team = self.plan_of_teams.token_numbers()
        members = (self.number * self.size + member for member in range(self.size))
        found = [np.searchsorted(team, self.plan.token_numbers(rank)) for rank in members]
        return [torch.from_numpy(places).to(self.device) for places in found]

    def part(self, x: Tensor, member: int) -> Tensor:
        """A member's part of the heads."""
        heads = x.shape[HEADS] // self.size
        return x.narrow(HEADS, member * heads, heads)

    def to_heads(self, tensors: Sequence[Tensor], label: str) -> list[Tensor]:
        """From all heads of own tokens to own heads of the team's tokens."""
        outgoing = {member: [self.part(x, member) for x in tensors] for member in self.others}
        incoming = {
            member: [_sized(self.part(x, 0), len(self.places[member])) for x in tensors] for member in self.others
        }
        received = self.link_of_members.start(label, outgoing, incoming, tensors[0].dtype, self.device).wait()
        tokens = self.plan_of_teams.local_tokens()
        results = []
        for n, x in enumerate(tensors):
            whole = x.new_empty(_sized(self.part(x, 0), tokens))
            for member, places in enumerate(self.places):
                whole.index_copy_(TOKENS, places, received[member][n] if member in received else self.part(x, member))
            results.append(whole)
        return results

    def to_tokens(self, tensors: Sequence[Tensor], label: str) -> list[Tensor]:
        """From own heads of the team's tokens to all heads of own tokens."""
        own = len(self.places[self.member])
        outgoing = {member: [x.index_select(TOKENS, self.places[member]) for x in tensors] for member in self.others}
        incoming = {member: [_sized(x, own) for x in tensors] for member in self.others}
        received = self.link_of_members.start(label, outgoing, incoming, tensors[0].dtype, self.device).wait()
        mine = [x.index_select(TOKENS, self.places[self.member]) for x in tensors]
        parts = [received.get(member, mine) for member in range(self.size)]
        return [torch.cat(heads, HEADS) for heads in zip(*parts, strict=True)]


class ToHeads(torch.autograd.Function):
    """`Team.to_heads` of tensors of one dtype."""

    @staticmethod
    def forward(ctx: Any, team: Team, label: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.team, ctx.label = team, label
        return tuple(team.to_heads(tensors, f"all-to-all of {label}"))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.team.to_tokens(grads, f"all-to-all of the gradients of {ctx.label}")


class ToTokens(torch.autograd.Function):
    """`Team.to_tokens` of one tensor."""

    @staticmethod
    def forward(ctx: Any, team: Team, label: str, x: Tensor) -> Tensor:
        ctx.team, ctx.label = team, label
        return team.to_tokens([x], f"all-to-all of {label}")[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.team.to_heads([grad], f"all-to-all of the gradients of {ctx.label}")[0]


def _sized(like: Tensor, tokens: int) -> tuple[int, ...]:
    return (*like.shape[:TOKENS], tokens, *like.shape[TOKENS + 1 :])
