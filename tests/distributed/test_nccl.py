"""A group of NCCL, of the one rank that one GPU has room for: every collective of context parallelism but messages to others."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tilewise as tw
from tilewise.distributed.agree import agree, check_place
from tilewise.errors import ArgumentError, PlanError

pytestmark = pytest.mark.gpu
LENGTH, HEADS, DIM = 300, 4, 64


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    limit = timedelta(seconds=30)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=limit, device_id=device)
    yield dist.group.WORLD
    dist.destroy_process_group()


def problem(**fields: Any) -> tw.Problem:
    return tw.Problem.of(batch=2, heads=HEADS, seqlen=LENGTH, head_dim=DIM, dtype="bfloat16", mask=tw.causal(), **fields)


def tensors() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shape = (2, HEADS, LENGTH, DIM)
    return [torch.randn(shape, generator=g).to("cuda", torch.bfloat16).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_results_are_those_of_one_call(group: Any, dropout_p: float) -> None:
    plan = tw.distributed.plan(problem(dropout_p=dropout_p), group)
    assert plan.problem.device == "cuda"
    inputs = tensors()
    shards = [plan.shard(x, 2) for x in inputs]
    out = plan.unshard(tw.distributed.attention(*shards, plan, seed=5), 2)
    backend = "triton" if dropout_p else "auto"  # the kernels that serve parts of a whole: others round elsewhere
    want = tw.attention(*inputs, mask=tw.causal(), dropout_p=dropout_p, seed=5, backend=backend)
    grads, wanted = (torch.autograd.grad(x.float().square().sum(), inputs) for x in (out, want))
    for ours, one in zip((out, *grads), (want, *wanted), strict=True):
        torch.testing.assert_close(ours, one)


def test_a_seed_is_drawn(group: Any) -> None:
    plan = tw.distributed.plan(problem(dropout_p=0.5), group)
    assert tw.distributed.attention(*tensors(), plan).isfinite().all()


def test_ranks_agree_by_messages_on_the_gpu(group: Any) -> None:
    agree(group, {"dtype": "bfloat16"})
    with pytest.raises(PlanError, match="rank 0: this"):
        agree(group, PlanError("this"))
    check_place(group, torch.device("cuda"))
    with pytest.raises(ArgumentError, match="q: on cpu, and the group is one of nccl"):
        check_place(group, torch.device("cpu"))


def test_loss_and_gradients(group: Any) -> None:
    plan = tw.distributed.plan(problem(), group)
    weight = torch.ones(LENGTH, device="cuda", requires_grad=True)
    labels = torch.arange(LENGTH, device="cuda")
    targets = plan.shift(plan.shard(labels, 0), 0)
    assert targets.tolist() == [*range(1, LENGTH), -100]
    loss = tw.distributed.mean_loss((weight * labels)[targets != -100].sum(), (targets != -100).sum(), group)
    loss.backward()
    tw.distributed.average_gradients([weight], group)
    assert weight.grad is not None and weight.grad[-1] == 0
    torch.testing.assert_close(weight.grad[:-1], labels[:-1] / (LENGTH - 1))
