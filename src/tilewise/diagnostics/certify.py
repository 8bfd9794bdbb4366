"""`certify`: is this output right? Rows chosen at random are recomputed in float64 and held to derived error bounds."""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor

from tilewise.api.cache import KVCache
from tilewise.api.options import CallOptions
from tilewise.api.parse import parse_call, result_inside
from tilewise.backends.base import Inputs
from tilewise.backends.pages import gathered
from tilewise.diagnostics.certificate import Certificate, RowFinding
from tilewise.errors import ArgumentError
from tilewise.model.show import describe_problem
from tilewise.numerics.bounds import ratios
from tilewise.numerics.rows import Rows, exact_rows
from tilewise.problem import Problem

BLOCK_ROWS = 128
"""Rows of a head recomputed at a time."""
SCREEN_ROWS = 4096
WORST = 5
MEAN_SLACK = 1.02
"""A computed mean may be this much beyond the largest value: 16-bit weights and a 16-bit result round by 2⁻⁸ each."""


@torch.no_grad()
def certify(
    q: Tensor,
    k: Tensor | KVCache,
    v: Tensor | None,
    out: Tensor,
    *,
    lse: Tensor | None = None,
    rows: int | float | Literal["all"] = 256,
    sample_seed: int | None = None,
    **options: Unpack[CallOptions],
) -> Certificate:
    """Recompute rows of `out` in float64 with the same mask, bias, softcap, sinks and dropout, and hold them to their bounds.

    The rest of the output is screened for values that no mean of v can take. Extra memory does not grow with the sequence.

    q: queries (B, Hq, Sq, D), as the call that made `out` had them; so are all other arguments.
    k: keys (B, Hk, Sk, D); or a KVCache, with v None and the rest as `attention_cached` had it: q and out (B, Sq, Hq, D) or
        packed, q turned where there was a rotary embedding, and the mask, which is causal() only if it is given.
    v: values (B, Hk, Sk, Dv).
    out: what is to be judged, (B, Hq, Sq, Dv); any library may have made it.
    lse: its log-sum-exp (B, Hq, Sq), to be judged too.
    rows: how many rows to recompute (an int), a share of them (a float), or "all".
    sample_seed: repeats a draw of rows; None draws them afresh.
    options: `mask`, `scale`, `bias` and all else that `attention` takes; `seed` where there was dropout.

    >>> print(tw.certify(q, cache, None, tw.attention_cached(q, cache), mask=tw.causal()))
    >>> out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> print(tw.certify(q, k, v, out, mask=tw.causal(), rows=1000))
    """
    begin = time.perf_counter()
    if isinstance(k, KVCache):
        q, k, v, out, lse = _unpaged(q, k, out, lse, options)
    if v is None:
        raise ArgumentError("v: None goes with a KVCache for k; pass the values")
    problem, inputs = parse_call(q.detach(), k.detach(), v.detach(), options, needs_seed=True)
    layout = options.get("layout", "bhsd")
    got = result_inside("out", out, problem, layout, (problem.head_dim_v,))
    got_lse = None if lse is None else result_inside("lse", lse, problem, layout, ())
    total = got[..., 0].numel() if problem.head_dim_v else 0
    seed = random.SystemRandom().getrandbits(48) if sample_seed is None else sample_seed
    chosen = _choose(rows, total, seed)
    tally = _Tally()
    for part in _grouped(problem, inputs, chosen):
        tally.see(problem, inputs, part, got, got_lse)
    stray = _screen(problem, inputs, got)
    return Certificate(
        ok=tally.outside == 0 and not stray,
        problem=describe_problem(problem),
        rows=total,
        checked=len(chosen),
        undefined=tally.undefined,
        outside=tally.outside,
        worst=tuple(tally.worst),
        error=tally.error,
        stray=stray,
        elements=got.numel(),
        sample_seed=seed,
        seconds=time.perf_counter() - begin,
    )


def _unpaged(
    q: Tensor, cache: KVCache, out: Tensor, lse: Tensor | None, options: CallOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """A call over a cache as one over packed tokens; `options` are told where sequences begin."""
    pages = cache.pages.now()
    if pages.k_scale is not None:
        raise ArgumentError(f"certify: pages of {pages.k.dtype} hold numbers that are rounded; certify needs those of q's dtype")
    cache.check()
    k, v, cu_k = gathered(pages, int(pages.seen.sum()), pages.k.dtype)
    options["cu_seqlens_k"] = cu_k
    if q.ndim == 4:
        options["cu_seqlens_q"] = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * q.shape[1]
        q, out = q.flatten(0, 1), out.flatten(0, 1)
        lse = None if lse is None else lse.transpose(0, 1).flatten(1)
    return q, k[0].transpose(0, 1), v[0].transpose(0, 1), out, lse


def _choose(rows: int | float | str, total: int, seed: int) -> Sequence[int]:
    if rows == "all":
        return range(total)
    if isinstance(rows, bool) or not isinstance(rows, (int, float)):
        raise ArgumentError(f"rows: got {rows!r}, need a number of rows, a share such as 0.01, or 'all'")
    if isinstance(rows, float) and not 0 < rows <= 1:
        raise ArgumentError(f"rows: got the share {rows}, need more than 0 and at most 1")
    if isinstance(rows, int) and rows < 1:
        raise ArgumentError(f"rows: got {rows}, need at least 1")
    number = min(total, -int(-rows * total // 1) if isinstance(rows, float) else rows)
    return range(total) if number == total else sorted(random.Random(seed).sample(range(total), number))


def _grouped(problem: Problem, inputs: Inputs, chosen: Iterable[int]) -> Iterator[tuple[Rows, Tensor]]:
    """Rows of one head of one sequence together, up to BLOCK_ROWS, and where they lie among the queries of the call."""
    starts = inputs.cu_q.tolist() if inputs.cu_q is not None else None
    held: dict[tuple[int, int], list[int]] = defaultdict(list)

    def block(key: tuple[int, int], tokens: list[int]) -> tuple[Rows, Tensor]:
        at = torch.tensor(tokens, device=inputs.q.device)
        return Rows(*key, at - starts[key[0]] if starts else at), at

    for number in chosen:
        head, token = divmod(number, problem.seqlen_q)
        if starts:
            key = bisect_right(starts, token) - 1, head
        else:
            key = divmod(head, problem.heads)
        held[key].append(token)
        if len(held[key]) == BLOCK_ROWS:
            yield block(key, held.pop(key))
    for key, tokens in held.items():
        yield block(key, tokens)


class _Tally:
    """What the recomputed rows showed."""

    def __init__(self) -> None:
        self.outside = self.undefined = 0
        self.error = 0.0
        self.worst: list[RowFinding] = []

    def see(
        self, problem: Problem, inputs: Inputs, part: tuple[Rows, Tensor], got: Tensor, got_lse: Tensor | None
    ) -> None:
        rows, tokens = part
        exact = exact_rows(problem, inputs, rows)
        at = (0 if problem.varlen else rows.sequence, rows.head, tokens)
        pairs = [("out", got[at], exact.out, exact.out_bound)]
        if got_lse is not None:
            pairs.append(("lse", got_lse[at][:, None], exact.lse[:, None], exact.lse_bound[:, None]))
        defined = exact.out.isfinite().all(-1) & (exact.lse < float("inf"))
        self.undefined += int((~defined).sum())
        wrong = torch.zeros_like(defined)
        for what, actual, want, bound in pairs:
            used = torch.where(defined[:, None], ratios(actual, want, bound), 0.0)  # [M, columns]
            error = torch.where(defined[:, None] & (want.abs() < float("inf")), (actual.double() - want).abs(), 0.0)
            self.error = max(self.error, float(error.nan_to_num(nan=float("inf")).max()))
            wrong |= (used > 1).any(-1)
            most, column = used.max(-1)
            for i in most.topk(min(WORST, len(most))).indices.tolist():
                j = int(column[i])
                values = (float(actual[i, j]), float(want[i, j]), float(bound[i, j]), float(most[i]))
                self.worst.append(RowFinding(rows.sequence, rows.head, int(rows.positions[i]), what, j, *values))
        self.outside += int(wrong.sum())
        self.worst = sorted(self.worst, key=lambda finding: -finding.used)[:WORST]


def _screen(problem: Problem, inputs: Inputs, got: Tensor) -> int | None:
    """Elements beyond kept · max |v| of their head and column; None where inputs that are not finite may explain them."""
    if not got.numel():
        return 0
    if not inputs.v.shape[2]:
        return int((got != 0).sum())
    for x in (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks):
        if x is not None and not _finite(x, masks=x is inputs.bias or x is inputs.sinks):
            return None
    low, high = inputs.v.amin(2), inputs.v.amax(2)
    limit = torch.maximum(-low, high).double().repeat_interleave(problem.group, dim=1)  # [B, Hq, Dv]
    info = torch.finfo(getattr(torch, problem.dtype))
    limit = limit * MEAN_SLACK / (1.0 - problem.dropout_p) + info.smallest_normal
    stray = 0
    for start in range(0, got.shape[2], SCREEN_ROWS):
        part = got[:, :, start : start + SCREEN_ROWS]
        stray += int((~(part.abs() <= limit[:, :, None].to(part.dtype))).sum())
    return stray


def _finite(x: Tensor, *, masks: bool) -> bool:
    """Are all elements finite? Found from the ends, which needs no copy; where −inf only masks, it is no fault."""
    low, high = torch.aminmax(x)
    return bool(high.isfinite() & (low.isfinite() | (masks & (low == float("-inf")))))
