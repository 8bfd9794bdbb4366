"""Cases of context parallelism on this rank, held to the float64 oracle of the whole problem."""

from __future__ import annotations

import traceback
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import tilewise as tw
from tests.distributed.cases import BY_NAME, Case, Whole
from tests.numerics import checks
from tilewise.backends.base import Grads
from tilewise.distributed.call import link_of
from tilewise.numerics import bounds
from tilewise.numerics.oracle import oracle, oracle_gradients


class Verdict(NamedTuple):
    """What is wrong with a case, empty if nothing is; and, from the rank that judges, how much of its bound each result uses."""

    wrong: str
    shares: dict[str, float]


def check_cases(rank: int, names: list[str], sizes: list[int]) -> dict[tuple[str, int], Verdict]:
    """The verdict on each case on a group of each size. The first two ranks take turns at judging."""
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    found = {}
    for number, name in enumerate(names):
        for size in sizes:
            if rank < size and BY_NAME[name].runs_on(size):
                try:
                    found[name, size] = run_case(BY_NAME[name], groups[size], judging=number % 2 == rank)
                except Exception:
                    found[name, size] = Verdict(traceback.format_exc(limit=-5), {})
    return found


def run_case(case: Case, group: Any, judging: bool) -> Verdict:
    """Forward and all gradients of a case over the group; bytes against the plan's; and, on one rank, the oracle's verdict."""
    whole = Whole.of(case)
    plan = tw.distributed.plan(whole.problem, group, lengths=case.lengths or None, shards=case.shards)
    if case.share > 1:
        plan = replace(plan, heads=case.share)
    planned = [plan.bytes_sent(backward=backward) for backward in (False, True)]
    link = link_of(plan)
    results = call(case, whole, plan)
    out, lse, given, leaves = results
    wrong = [] if link.sent == planned[0] else [f"sent {link.sent} bytes forward, planned {planned[0]}"]
    before = link.sent
    grads = torch.autograd.grad([out, lse], leaves, given)
    backward = link.sent - before
    if backward != planned[1]:
        wrong.append(f"sent {backward} bytes backward, planned {planned[1]}")
    excesses, shares = verdict(case, whole, plan, (out.detach(), lse.detach()), grads, judging)
    return Verdict("; ".join(wrong + excesses), shares)


def outside(case: Case, x: Tensor) -> Tensor:
    """(B, H, S, D) in the layout of the case."""
    if case.packed:
        return x[0].transpose(0, 1)
    return x.transpose(1, 2) if case.options.get("layout") == "bshd" else x


def inside(case: Case, x: Tensor) -> Tensor:
    if case.packed:
        return x.transpose(0, 1)[None]
    return x.transpose(1, 2) if case.options.get("layout") == "bshd" else x


def call(case: Case, whole: Whole, plan: Any) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """out, lse, what comes back to them, and the leaves, all of this rank."""
    inputs = whole.inputs
    leaves = [outside(case, plan.shard(x, 2)).contiguous().requires_grad_() for x in inputs[:3]]
    q, k, v = leaves
    options = dict(case.options)
    if inputs.bias is not None:
        bias = plan.shard(inputs.bias, 2) if inputs.bias.shape[2] > 1 else inputs.bias
        options["bias"] = bias.clone().requires_grad_()
        leaves.append(options["bias"])
    if inputs.alibi is not None:
        options["bias"] = tw.alibi(inputs.alibi[0])
    if inputs.sinks is not None:
        options["sinks"] = inputs.sinks.clone().requires_grad_()
        leaves.append(options["sinks"])
    out, lse = tw.distributed.attention(q, k, v, plan, return_lse=True, **options)
    dlse = None if whole.dlse is None else plan.shard(whole.dlse, 2)
    given = [outside(case, plan.shard(whole.dout, 2)), torch.zeros_like(lse)]
    if dlse is not None:
        given[1] = dlse[0] if case.packed else dlse
    return out, lse, given, leaves


def verdict(
    case: Case, whole: Whole, plan: Any, results: tuple[Tensor, Tensor], grads: tuple[Tensor, ...], judging: bool
) -> tuple[list[str], dict[str, float]]:
    """The results of all ranks against the oracle: what is outside its bound, and how much of it each uses. Every rank takes
    part, one judges."""
    out = plan.unshard(inside(case, results[0]), 2)
    lse = plan.unshard(results[1][None] if case.packed else results[1], 2)
    dq, dk, dv, *rest = grads
    dq, dk, dv = (plan.unshard(inside(case, x), 2) for x in (dq, dk, dv))
    dbias = dsinks = None
    if whole.inputs.bias is not None:
        dbias = rest.pop(0)
        dbias = plan.unshard(dbias, 2) if whole.inputs.bias.shape[2] > 1 else _total(plan, dbias)
    if whole.inputs.sinks is not None:
        dsinks = _total(plan, rest.pop(0))
    if not judging:
        return [], {}
    actual = {"out": out, "lse": lse, **Grads(dq, dk, dv, dbias, dsinks)._asdict()}
    truth = exact(case.name)
    given = {name: x for name, x in actual.items() if x is not None}
    found = (checks.check(x, *truth[name], name) for name, x in given.items())
    shares = {name: float(bounds.ratios(x, *truth[name]).max()) for name, x in given.items() if x.numel()}
    return [str(excess) for excess in found if excess is not None], shares


@lru_cache(maxsize=2)
def exact(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The results of a case in float64, and how far from them a correct one may be; the same for every group."""
    whole = Whole.of(BY_NAME[name])
    with torch.no_grad():
        results = oracle(whole.problem, whole.inputs)
    limits = bounds.forward(whole.problem, whole.inputs)
    given = (whole.problem, whole.inputs, whole.dout, whole.dlse)
    truth = dict(zip(limits._fields, zip(results, limits, strict=True), strict=True))
    pairs = zip(oracle_gradients(*given), bounds.backward(*given), strict=True)
    return truth | dict(zip(Grads._fields, pairs, strict=True))  # type: ignore[arg-type]


def _total(plan: Any, x: Tensor) -> Tensor:
    """The sum over the ranks, as for a weight that every rank has."""
    total = x.double()
    dist.all_reduce(total, group=plan.group)
    return total.to(x.dtype)
