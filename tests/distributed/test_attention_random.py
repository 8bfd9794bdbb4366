"""Random problems over random numbers of ranks, which are threads here: results, gradients and bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tests.distributed.threads import on_ranks
from tests.numerics import checks
from tilewise.backends.base import Grads, Inputs, Needs
from tilewise.distributed.context import ContextPlan
from tilewise.distributed.exchange import Link
from tilewise.distributed.passes import Backward, Cotangents, Forward
from tilewise.distributed.segments import Call, Local
from tilewise.problem import Problem


@st.composite
def masks(draw: st.DrawFn, length: int, batch: int) -> tw.Mask:
    """One or two kinds, combined."""
    number = st.integers(1, max(1, length))

    def one() -> tw.Mask:
        kind = draw(st.sampled_from(["causal", "window", "sides", "prefix", "padding", "documents", "blocks", "dense", "full"]))
        g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        rows = draw(st.sampled_from([1, batch]))
        if kind == "causal":
            return tw.causal(offset=draw(st.sampled_from([None, 0, 2, -3])))
        if kind == "window":
            return tw.causal() & tw.window(draw(number))
        if kind == "sides":
            return tw.window(draw(number), draw(number))
        if kind == "prefix":
            return tw.causal() | tw.prefix(draw(number))
        if kind == "padding":
            return tw.key_padding(torch.randint(0, length + 1, (rows,), generator=g))
        if kind == "documents":
            ids = torch.randint(0, 4, (rows, length), generator=g)
            return tw.documents(ids if draw(st.booleans()) else ids.sort(dim=1).values)
        if kind == "blocks":
            size = draw(st.sampled_from([1, 3, 8]))
            return tw.blocks(torch.rand((rows, 1, -(-length // size), -(-length // size)), generator=g) < 0.4, size)
        if kind == "dense":
            return tw.dense(torch.rand((rows, 1, length, length), generator=g) < 0.4)
        return tw.full()

    mask = one()
    if draw(st.booleans()):
        other = one()
        mask = mask & other if draw(st.booleans()) else mask | other
    return mask


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, tuple[int, ...] | None, int, str]:
    packed = draw(st.booleans())
    lengths = tuple(draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))) if packed else None
    length, batch = (sum(lengths), len(lengths)) if lengths is not None else (draw(st.integers(1, 40)), 2)
    mask: Any = tw.causal() & tw.window(draw(st.integers(1, 20))) if packed else draw(masks(length, batch))
    problem = Problem.of(
        batch=batch, heads=4, kv_heads=draw(st.sampled_from([1, 2, 4])), seqlen=length, head_dim=8, head_dim_v=4,
        dtype="float64", mask=mask, varlen=packed, dropout_p=draw(st.sampled_from([0.0, 0.25])), needs_grad=True,
    )  # fmt: skip
    shards = draw(st.sampled_from(["balanced", "contiguous", "head_tail", "zigzag"]))
    return problem, lengths, draw(st.integers(1, 6)), shards


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=problems())
def test_random_problems(drawn: tuple[Problem, tuple[int, ...] | None, int, str]) -> None:
    problem, lengths, ranks, shards = drawn
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)

    def draw(heads: int, dim: int) -> Tensor:
        return torch.randn((1 if lengths is not None else problem.batch, heads, problem.seqlen_q, dim), generator=g).double()

    q, k, v, dout = draw(4, 8), draw(problem.kv_heads, 8), draw(problem.kv_heads, 4), draw(4, 4)
    cu = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = Inputs(q, k, v, seed=torch.tensor(3), cu_q=cu, cu_k=cu)
    plan = tw.distributed.plan(problem, lengths=lengths, shards=shards, ranks=ranks)

    def task(plan: ContextPlan, link: Link) -> tuple[Tensor, ...]:
        call = Call(plan, replace(problem, needs_lse=True), "auto", torch.device("cpu"))
        local = Local(*(plan.shard(x, 2) for x in inputs[:3]), seed=inputs.seed)
        out, lse = Forward(call, link, local).compute()
        assert link.sent == plan.bytes_sent()
        given = Cotangents(out, lse, plan.shard(dout, 2), None, Needs())
        grads = Backward(call, link, local, given).gradients()
        assert link.sent == plan.bytes_sent() + plan.bytes_sent(backward=True)
        return out, lse, *(x for x in grads[:3] if x is not None)

    results = on_ranks(plan, task)
    places = torch.cat([torch.from_numpy(plan.token_numbers(rank)) for rank in range(ranks)])
    whole = [torch.empty_like(x := torch.cat(parts, 2)).index_copy_(2, places, x) for parts in zip(*results, strict=True)]
    wrong = checks.check_forward(problem, inputs, *whole[:2])
    wrong += checks.check_backward(problem, inputs, dout, None, Grads(*whole[2:]))
    assert not wrong, "\n".join(map(str, wrong))
