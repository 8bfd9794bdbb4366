"""The one merge: partial attentions over disjoint sets of keys combine by an associative, commutative function.

A partial result is a pair (out, lse): out (..., M, Dv) normalised over its own keys, lse (..., M) the logarithm of its
denominator. The unit is (0, −inf), the attention over no keys. Arithmetic and results are fp32, or fp64 if any part is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]

NEG_INF = float("-inf")


def merge(a: Partial, b: Partial) -> Partial:
    """The attention over the keys of both."""
    return merge_many((a[0], b[0]), (a[1], b[1]))


def merge_into(a: Partial, b: Partial) -> None:
    """`merge` in the place of the first part, which has the dtype of the arithmetic: two passes over memory."""
    out, lse = a
    stacked = torch.stack([lse, b[1].to(lse.dtype)])
    total = log_sum(stacked, dim=0)
    weights = torch.exp(stacked - finite(total)).unsqueeze(-1)
    out.mul_(weights[0]).addcmul_(weights[1], b[0].to(out.dtype))
    lse.copy_(total)


def merge_many(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> Partial:
    """The attention over the keys of all parts: sequences, or tensors with one leading dimension more."""
    dtype = _working_dtype(*outs, *lses)
    stacked = lses.to(dtype) if isinstance(lses, Tensor) else torch.stack([lse.to(dtype) for lse in lses])
    lse = log_sum(stacked, dim=0)
    weights = torch.exp(stacked - finite(lse)).unsqueeze(-1)  # [S, ..., M, 1]; 0 for a part without keys
    if isinstance(outs, Tensor):
        return (weights * outs).sum(0), lse
    out = weights[0] * outs[0]
    for weight, part in zip(weights[1:], outs[1:], strict=True):
        out = out + weight * part
    return out, lse


def join_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Partial:
    """Let each head's sink (H,) join the denominators of (..., H, M): a key whose value is 0.

    Rows without keys stay 0, with gradient 0 whatever comes back to them.
    """
    dtype = _working_dtype(out, lse)
    lse = lse.to(dtype)
    both = torch.stack([lse, sink.to(dtype).unsqueeze(-1).expand_as(lse)])
    total = log_sum(both, dim=0)
    joined = out * torch.exp(lse - finite(total)).unsqueeze(-1)
    return torch.where((lse == NEG_INF).unsqueeze(-1), 0.0, joined), total


def log_sum(x: Tensor, dim: int) -> Tensor:
    """log Σ exp(x) along `dim`; −inf where there is nothing to sum and +inf where a term is, both with gradient 0 (torch's
    have NaN)."""
    empty, endless = (x == NEG_INF).all(dim, keepdim=True), (x == -NEG_INF).any(dim, keepdim=True)
    total = torch.logsumexp(x.masked_fill(empty | endless, 0.0), dim=dim)
    return total.masked_fill(empty.squeeze(dim), NEG_INF).masked_fill(endless.squeeze(dim), -NEG_INF)


def softmax_with_sink(x: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The softmax along the last side of (..., H, M, N), each head's sink (H,) in the sum; the sink's weight; the log-sum-exp.

    Weights are 0 without any term. They are not made from the log-sum-exp: far from 0 that has no digits left for the number of
    terms. A term of +inf takes all. The sink joins the sum last, so that one of -inf changes no bit.
    """
    sink = None if sinks is None else sinks.to(x.dtype)[:, None, None].expand(*x.shape[:-1], 1)
    lse = log_sum(x if sink is None else torch.cat([x, sink], dim=-1), dim=-1)
    most = torch.finfo(x.dtype).max
    x = x.clamp(max=most)
    tops = [x.amax(-1, keepdim=True)] if x.shape[-1] else []
    if sink is not None:
        sink = sink.clamp(max=most)
        tops.append(sink)
    if not tops:
        return x, None, lse
    top = reduce(torch.maximum, tops).detach()
    top = top.masked_fill(top == NEG_INF, 0.0)
    terms = torch.exp(x - top)
    total, own = terms.sum(-1, keepdim=True), None
    if sink is not None:
        own = torch.exp(sink - top)
        total = total + own
    total = total.masked_fill(total == 0, 1.0)
    return terms / total, None if own is None else (own / total).squeeze(-1), lse


def finite(lse: Tensor) -> Tensor:
    """`lse` with 0 for −inf, so that exp(x − lse) of an empty row is exp(−inf) = 0 and not NaN."""
    return lse.masked_fill(lse == NEG_INF, 0.0)


def _working_dtype(*parts: Tensor) -> torch.dtype:
    return reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
