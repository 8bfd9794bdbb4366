"""What a row saw, gathered while the online softmax goes over its keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Statistics
from tilewise.backends.sequence import Range, RunningTop
from tilewise.numerics.merge import NEG_INF, finite
from tilewise.problem import Problem


class Step(NamedTuple):
    """One tile joins the online softmax."""

    s: Tensor  # [B, Hq, M, N], -inf where masked
    p: Tensor  # exp(s - m_new)
    m: Tensor  # [B, Hq, M, 1]
    m_new: Tensor
    alpha: Tensor
    l: Tensor  # before the tile


class RowWatch:
    """One query block's statistics. Over the keys visited so far: t = Σ exp(s - m) (s - m), so that the entropy is
    log l - t / l; a new maximum shifts every term, t = alpha · (t + (m_old - m_new) · l)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.t: Tensor | None = None
        self.top: RunningTop | None = None
        self.max_logit = self.entropy = self.key_lse = torch.empty(0)

    def see(self, step: Step, k: Range) -> None:
        if self.t is None:
            self.t = torch.zeros_like(step.m)
        shift = torch.where(step.m == NEG_INF, 0.0, step.m - finite(step.m_new))
        gap = torch.where(step.s == NEG_INF, 0.0, step.s - finite(step.m_new))
        self.t = step.alpha * (self.t + shift * step.l) + (step.p * gap).sum(dim=-1, keepdim=True)
        if self.problem.top:
            self.top = self.top or RunningTop(step.m, self.problem.top)
            self.top.add(step.s, k[0])

    def finish(self, m: Tensor, l: Tensor) -> None:
        """The state over all keys, before the sink joins."""
        t = torch.zeros_like(m) if self.t is None else self.t
        self.max_logit = m.squeeze(-1)
        self.entropy = torch.where(l > 0, l.log() - t / l, 0.0).squeeze(-1)
        self.key_lse = (finite(m) + l.log()).squeeze(-1)

    def store(self, lse: Tensor, stats: Statistics, q: Range) -> None:
        """Into the rows of a sequence's statistics; `lse` [B, Hq, M] is that of the weights."""
        rows = slice(*q)
        for result, own in ((stats.max_logit, self.max_logit), (stats.entropy, self.entropy), (stats.key_lse, self.key_lse)):
            if result is not None:
                result[:, :, rows] = own
        if stats.weights is not None and stats.indices is not None and self.top is not None:
            stats.weights[:, :, rows], stats.indices[:, :, rows] = self.top.weights(lse)
