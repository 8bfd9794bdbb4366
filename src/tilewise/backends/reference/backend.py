"""Standard attention: the whole score matrix at once, gradients by autograd. O(N²) memory, so only on explicit request."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import (
    Backend,
    BackwardInputs,
    Direction,
    EntropyCotangent,
    Grads,
    Inputs,
    Jvp,
    Statistics,
    Tangents,
    Verdict,
    empty_lse,
    empty_out,
    empty_statistics,
    rounded,
)
from tilewise.backends.reference import plan
from tilewise.backends.sequence import RunningTop, SequenceView, sequences
from tilewise.masks import TileClass
from tilewise.numerics.merge import log_sum, softmax_with_sink
from tilewise.problem import Problem


class Attended(NamedTuple):
    out: Tensor  # [B, Hq, M, Dv]
    lse: Tensor  # [B, Hq, M]
    p: Tensor  # [B, Hq, M, N]
    s: Tensor  # [B, Hq, M, N], -inf where masked

    def entropy(self) -> Tensor:
        """[B, Hq, M]: of the softmax without the sink."""
        p, _, _ = softmax_with_sink(self.s)
        return -(p * torch.where(p > 0, p, 1.0).log()).sum(dim=-1)


def attend(seq: SequenceView) -> Attended:
    """softmax(QKᵀ)V over one tile that is the whole matrix."""
    inputs = seq.inputs
    q, k = (0, seq.seqlen_q), (0, seq.seqlen_k)
    tile = seq.scores(seq.load(inputs.q, q), q, k, TileClass.PARTIAL)
    p, _, lse = softmax_with_sink(tile.s, inputs.sinks)
    out = tile.rows(seq.unfold(seq.fold(seq.dropped(p, q, k)) @ seq.load(inputs.v, k, tile.seen), seq.seqlen_q))
    return Attended(out, lse, p, tile.s)


def watch(seq: SequenceView, found: Attended, stats: Statistics) -> None:
    """The statistics of one sequence, written into those of the call."""
    s, cut = found.s, seq.cut
    if stats.max_logit is not None and seq.seqlen_k:
        cut.queries(stats.max_logit)[:] = s.amax(dim=-1)
    if stats.entropy is not None and stats.key_lse is not None:
        cut.queries(stats.entropy)[:] = found.entropy()
        cut.queries(stats.key_lse)[:] = log_sum(s, dim=-1)
    if stats.key_mass is not None:
        cut.keys(stats.key_mass)[:] = found.p.sum(dim=-2)
    if stats.weights is not None and stats.indices is not None:
        top = RunningTop(s[..., :1], stats.weights.shape[-1])
        top.add(s, 0)
        cut.queries(stats.weights)[:], cut.queries(stats.indices)[:] = top.weights(found.lse)


class Reference(Backend):
    name = "reference"

    def usable(self, device: str) -> Verdict:
        return Verdict(True)

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        return plan.supports(problem)

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        return plan.declines(problem)

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, lse, _ = self.statistics(problem, inputs)
        return out, lse

    def statistics(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Statistics]:
        out, lse = empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q, problem.precision)
        stats = empty_statistics(problem, lse)
        for seq in sequences(problem, inputs):
            found = attend(seq)
            for result, own in ((out, found.out), (lse, found.lse)):
                seq.cut.queries(result)[:] = rounded(own, result.dtype)
            watch(seq, found, stats)
        return out, lse, stats

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        return self._backward(problem, inputs, given, None)

    def entropy_backward(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: EntropyCotangent
    ) -> Grads:
        return self._backward(problem, inputs, given, entropy.dentropy)

    def _backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs, dentropy: Tensor | None) -> Grads:
        _, lse, dout, dlse, needs = given
        wanted = {"q": needs.dq, "k": needs.dk, "v": needs.dv, "bias": needs.dbias, "sinks": needs.dsinks}
        values = inputs._asdict()
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        with torch.enable_grad():
            chosen = [name for name, need in wanted.items() if need and values[name] is not None]
            # in the dtype of the arithmetic, so that gradients are summed before they are rounded
            leaves = {name: values[name].detach().to(lse.dtype).requires_grad_() for name in chosen}
            totals = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
            for seq in sequences(problem, inputs._replace(**leaves)):
                found = attend(seq)
                results = [(found.out, dout), (found.lse, dlse)]
                if dentropy is not None:
                    results.append((found.entropy(), dentropy))
                # neither log-sum-exp nor entropy depends on v
                pairs = [(r, x) for r, x in results if r.requires_grad]
                upstream = [seq.cut.queries(x).to(r.dtype) for r, x in pairs]
                parts = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), upstream, allow_unused=True)
                for total, part in zip(totals.values(), parts, strict=True):
                    if part is not None:
                        total += part
        grads = {name: rounded(total, values[name].dtype) for name, total in totals.items()}
        return Grads(*(grads.get(name) for name in wanted))

    def derives(self, problem: Problem, inputs: Inputs | None = None, *, derivative: str) -> Verdict:
        return plan.derives(problem, derivative=derivative)

    def jvp(self, problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
        out, lse = self.forward(problem, inputs)
        second = differentiated_twice(problem, inputs, torch.zeros_like(out), torch.zeros_like(lse), tangents)
        return Jvp(out, lse, rounded(second["out"], out.dtype), second["lse"])

    def double_backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs, direction: Direction) -> Grads:
        dlse = torch.zeros_like(given.lse) if given.dlse is None else given.dlse
        second = differentiated_twice(problem, inputs, given.dout, dlse, direction.tangents)
        wanted = zip(Tangents._fields, given.needs, strict=True)
        values = {name: getattr(inputs, name) if need else None for name, need in wanted}
        return Grads(*(None if x is None else rounded(second[name], x.dtype) for name, x in values.items()))


def differentiated_twice(
    problem: Problem, inputs: Inputs, dout: Tensor, dlse: Tensor, tangents: Tangents
) -> dict[str, Tensor]:
    """By name, the gradients of ⟨tangents, gradients of the call⟩: in dout and dlse, as "out" and "lse", and in the inputs.

    Those in dout and dlse are the derivatives of out and lse along the tangents.
    """
    values = {"out": dout, "lse": dlse} | {name: getattr(inputs, name) for name in Tangents._fields}
    with torch.enable_grad():
        leaves = {n: x.detach().to(dlse.dtype).clone().requires_grad_() for n, x in values.items() if x is not None}
        own = {name: leaf for name, leaf in leaves.items() if name in Tangents._fields}
        totals = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        for seq in sequences(problem, inputs._replace(**own)):
            results = attend(seq)
            upstream = [seq.cut.queries(leaves[name]) for name in ("out", "lse")]
            grads = torch.autograd.grad(results, list(own.values()), upstream, create_graph=True, allow_unused=True)
            pairs = ((grad, getattr(tangents, name)) for name, grad in zip(own, grads, strict=True))
            moved = sum((g * t.to(g.dtype)).sum() for g, t in pairs if g is not None and t is not None)
            if isinstance(moved, Tensor) and moved.requires_grad:
                parts = torch.autograd.grad(moved, list(leaves.values()), allow_unused=True)
                for total, part in zip(totals.values(), parts, strict=True):
                    if part is not None:
                        total += part
    return totals


backend = Reference()
