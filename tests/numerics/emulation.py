"""Attention as kernels compute it: tile by tile in fp32, P and dS rounded to the dtype, backward from stored out, lse.

Written apart from the backends and from the oracle, so that the bounds meet the arithmetic they model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.masks import allowed
from tilewise.numerics.oracle import Gradients
from tilewise.numerics.philox import keep_tile
from tilewise.problem import Problem

TILE = 32


class Case(NamedTuple):
    """One call: a problem, and inputs under the names the oracle reads."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    dout: Tensor
    dlse: Tensor
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    origins: Tensor | None = None


def make_case(dtype: str, m: int, n: int, d: int, spread: float = 1.0, seed: int = 0, **features: Any) -> Case:
    """Random inputs; `spread` multiplies q and so the scores."""
    features = {"batch": 2, "heads": 4, "kv_heads": 2, **features}
    problem = Problem.of(seqlen=m, kv_seqlen=n, head_dim=d, dtype=dtype, **features)
    generator = torch.Generator().manual_seed(seed)
    store, work = getattr(torch, dtype), torch.float64 if dtype == "float64" else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    b, h, hk = problem.batch, problem.heads, problem.kv_heads
    return Case(
        problem=problem,
        q=(spread * draw(b, h, m, d)).to(store),
        k=draw(b, hk, n, d).to(store),
        v=draw(b, hk, n, problem.head_dim_v).to(store),
        bias=draw(*problem.bias).to(store) if problem.bias else None,
        alibi=draw(1, h).abs().float() if problem.alibi else None,
        sinks=draw(h).to(store) if problem.sinks else None,
        seed=torch.tensor(0x1234_5678_9ABC) if problem.dropout_p else None,
        dout=draw(b, h, m, problem.head_dim_v).to(store),
        dlse=draw(b, h, m).to(work),
    )


def truncate(x: Tensor) -> Tensor:
    """fp32 cut to the 11 significant bits of tf32."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


class Kernel:
    """`problem` is what it computes, right or wrong; the case only lends the tensors."""

    def __init__(self, case: Case, problem: Problem | None = None) -> None:
        self.case = case
        self.problem = problem or case.problem
        self.store = case.q.dtype
        self.work = torch.float64 if self.store == torch.float64 else torch.float32
        self.q = self.operand(case.q)
        self.k, self.v = (self.operand(x).repeat_interleave(self.problem.group, 1) for x in (case.k, case.v))

    def operand(self, x: Tensor) -> Tensor:
        """A factor of a matrix product: rounded to the inputs' dtype, or to tf32."""
        x = x.to(self.store).to(self.work)
        return truncate(x) if self.problem.precision == "tf32" else x

    def tiles(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | float]]:
        """Key tiles with their logits, the tanh of softcap, and the dropout factors."""
        problem, (m, n) = self.problem, (self.problem.seqlen_q, self.problem.seqlen_k)
        for k0 in range(0, n, TILE):
            k1 = min(k0 + TILE, n)
            s = self.q @ self.k[:, :, k0:k1].mT * problem.scale
            tanh = torch.zeros_like(s)
            if problem.softcap:
                tanh = torch.tanh(s / problem.softcap)
                s = problem.softcap * tanh
            if self.case.bias is not None:
                s = s + self.case.bias.to(self.work).expand(-1, -1, -1, n)[..., k0:k1]
            if self.case.alibi is not None:
                distance = (torch.arange(m)[:, None] + (n - m) - torch.arange(k0, k1)).abs()
                s = s - self.case.alibi[:, :, None, None].to(self.work) * distance
            seen = allowed(problem.program, problem.shape, (0, m), (k0, k1), torch.arange)
            if seen is not None:
                s = s.masked_fill(~torch.as_tensor(seen), float("-inf"))
            keep: Tensor | float = 1.0
            if problem.dropout_p:
                assert self.case.seed is not None
                ids = range(problem.batch), range(problem.heads)
                kept = keep_tile(self.case.seed, problem.dropout_p, *ids, range(m), range(k0, k1))
                keep = kept.to(self.work) / (1 - problem.dropout_p)
            yield slice(k0, k1), s, tanh, keep

    def forward(self) -> tuple[Tensor, Tensor]:
        top = torch.full(self.q.shape[:3], float("-inf"), dtype=self.work)
        l = torch.zeros_like(top)
        o = torch.zeros(*top.shape, self.v.shape[-1], dtype=self.work)
        # over the keys so far: o = Σ exp(s - top) v,  l = Σ exp(s - top)
        for cols, s, _, keep in self.tiles():
            new = torch.maximum(top, s.amax(-1))
            base = new.masked_fill(new.isinf(), 0.0)
            alpha, p = torch.exp(top - base), torch.exp(s - base[..., None])
            l = alpha * l + p.sum(-1)
            o = alpha[..., None] * o + self.operand(p * keep) @ self.v[:, :, cols]
            top = new
        lse = torch.where(l > 0, top.masked_fill(top.isinf(), 0.0) + l.log(), float("-inf"))
        out = torch.where(l[..., None] > 0, o / l[..., None], 0.0)
        if self.case.sinks is not None:
            total = torch.logaddexp(lse, self.case.sinks.to(self.work)[:, None].expand_as(lse))
            out, lse = out * torch.exp(lse - total)[..., None], total
        return out.to(self.store), lse

    def backward(self, out: Tensor, lse: Tensor) -> Gradients:
        scale, group = self.problem.scale, self.problem.group
        dout, dlse = self.operand(self.case.dout), self.case.dlse
        shift = dlse - (self.case.dout.to(self.work) * out.to(self.work)).sum(-1)
        base = lse.masked_fill(lse.isinf(), 0.0)
        dq, dk, dv, dlogits = torch.zeros_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v), []
        for cols, s, tanh, keep in self.tiles():
            p = torch.exp(s - base[..., None])
            dv[:, :, cols] = self.operand(p * keep).mT @ dout
            ds = p * (keep * (dout @ self.v[:, :, cols].mT) + shift[..., None])
            dlogits.append(ds)
            ds = self.operand(ds * (1 - tanh**2))
            dq = dq + scale * (ds @ self.k[:, :, cols])
            dk[:, :, cols] = scale * (ds.mT @ self.q)
        dbias = dsinks = None
        if self.case.bias is not None:
            dbias = torch.cat(dlogits, -1).sum_to_size(self.case.bias.shape).to(self.case.bias.dtype)
        if self.case.sinks is not None:
            p_sink = torch.exp(self.case.sinks.to(self.work)[:, None] - base)
            dsinks = (p_sink * shift).sum((0, 2)).to(self.case.sinks.dtype)
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        return Gradients(dq.to(self.store), dk.to(self.store), dv.to(self.store), dbias, dsinks)
