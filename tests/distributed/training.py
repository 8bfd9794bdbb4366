"""What a rank runs to show how attention behaves in training; each function returns what went wrong, empty if nothing."""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.distributed.call import link_of
from tilewise.numerics.philox import keep_tile

LENGTH = 53


def problem(**features: Any) -> tw.Problem:
    settings = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": LENGTH, "head_dim": 8, "dtype": "float64", "mask": tw.causal()}
    return tw.Problem.of(**{**settings, **features})


def tensors(seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn((2, heads, LENGTH, 8), generator=g, dtype=torch.float64) for heads in (4, 2, 2)]


def dropout_is_that_of_one_rank(group: Any) -> str:
    """With q = 0 all weights of a row are equal, and unit vectors as values show which were kept: bit for bit."""
    whole = problem(head_dim_v=LENGTH, mask=tw.full(), dropout_p=0.5)
    plan = tw.distributed.plan(whole, group)
    q, k, _ = tensors()
    v = torch.eye(LENGTH, dtype=torch.float64).expand(2, 2, LENGTH, LENGTH)
    out = tw.distributed.attention(*(plan.shard(x, 2) for x in (q * 0, k, v)), plan, seed=11)
    kept = plan.unshard(out, 2) > 0
    want = keep_tile(torch.tensor(11), 0.5, range(2), range(4), range(LENGTH), range(LENGTH))
    return "" if torch.equal(kept, want) else f"{int((kept != want).sum())} of {want.numel()} differ"


def one_seed_is_drawn_for_all(group: Any) -> str:
    whole = problem(dropout_p=0.5)
    plan = tw.distributed.plan(whole, group)
    torch.manual_seed(7 + 5 * dist.get_rank(group))  # generators may differ: rank 0's counts
    out = tw.distributed.attention(*(plan.shard(x, 2) for x in tensors()), plan)
    torch.manual_seed(7)
    want = tw.attention(*tensors(), mask=tw.causal(), dropout_p=0.5)
    return _near(plan.unshard(out, 2), want)


def runs_are_bitwise_equal(group: Any) -> str:
    plan = tw.distributed.plan(problem(dtype="float32"), group)
    first, second = ([x.detach() for x in _step(plan, torch.float32)] for _ in range(2))
    with torch.no_grad():
        out = tw.distributed.attention(*(plan.shard(x, 2).float() for x in tensors()), plan)
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and torch.equal(out, first[0])
    return "" if same else "bits differ between runs"


def _step(plan: Any, dtype: torch.dtype) -> list[Tensor]:
    leaves = [plan.shard(x, 2).to(dtype).requires_grad_() for x in tensors()]
    out = tw.distributed.attention(*leaves, plan)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def checkpointing_repeats_dropout(group: Any) -> str:
    plan = tw.distributed.plan(problem(dropout_p=0.3), group)
    leaves = [plan.shard(x, 2).requires_grad_() for x in tensors()]

    def layer(*qkv: Tensor) -> Tensor:
        return tw.distributed.attention(*qkv, plan)  # type: ignore[arg-type, call-overload, no-any-return]

    results = []
    for run in (layer, lambda *qkv: checkpoint(layer, *qkv, use_reentrant=False)):
        torch.manual_seed(3)
        out = run(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return "" if same else "a checkpointed layer gives other gradients"


class Layer(nn.Module):
    """Projections around attention; `plan` None: on one machine."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.plan, self.qkv, self.out = plan, nn.Linear(32, 64, dtype=torch.float64), nn.Linear(32, 16, dtype=torch.float64)
        self.sinks = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([32, 16, 16], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v))
        if self.plan is None:
            y = tw.attention(q, k, v, mask=tw.causal(), sinks=self.sinks)
        else:
            y = tw.distributed.attention(q, k, v, self.plan, sinks=self.sinks)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


def data_parallel_sums_the_gradients(group: Any) -> str:
    plan = tw.distributed.plan(problem(sinks=True), group)
    x = torch.randn((2, LENGTH, 32), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    alone = Layer(None)
    alone(x).square().mean().backward()
    model = nn.parallel.DistributedDataParallel(Layer(plan), process_group=group)
    loss = model(plan.shard(x, 1)).square().sum() / (2 * LENGTH * 16)
    (loss * plan.ranks).backward()  # DDP divides by the ranks
    pairs = zip(alone.named_parameters(), model.module.parameters(), strict=True)
    found = ((name, _near(mine.grad, one.grad)) for (name, one), mine in pairs if mine.grad is not None)
    return "; ".join(f"{name}: {why}" for name, why in found if why)


def the_rest_of_the_options(group: Any) -> str:
    """bshd, autocast, a mesh's group, keys that want no gradient."""
    plan = tw.distributed.plan(problem(dtype="bfloat16"), group)
    q, k, v = (plan.shard(x, 2).float().transpose(1, 2).contiguous() for x in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        out = tw.distributed.attention(q.requires_grad_(), k, v, plan, layout="bshd")
    (dq,) = torch.autograd.grad(out.float().sum(), q)
    if out.dtype != torch.bfloat16 or out.shape != q.shape or dq.dtype != torch.float32:
        return f"{out.dtype} {tuple(out.shape)} {dq.dtype}"
    return "" if link_of(plan).sent == plan.bytes_sent() + plan.bytes_sent(backward=True) else "bytes differ from the plan's"


def _near(a: Tensor | None, b: Tensor | None) -> str:
    assert a is not None and b is not None
    return "" if torch.allclose(a, b, rtol=1e-9, atol=1e-11) else f"off by {float((a - b).abs().max()):.3g}"


CHECKS = {
    one.__name__: one
    for one in (
        *(dropout_is_that_of_one_rank, one_seed_is_drawn_for_all, runs_are_bitwise_equal, checkpointing_repeats_dropout),
        *(data_parallel_sums_the_gradients, the_rest_of_the_options),
    )
}


def check_training(rank: int, sizes: list[int]) -> dict[tuple[str, int], str]:
    """What went wrong with each check on a group of each size."""
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    wrong = {}
    for name, check in CHECKS.items():
        for size in sizes:
            if rank < size:
                try:
                    wrong[name, size] = check(groups[size])
                except Exception:
                    wrong[name, size] = traceback.format_exc(limit=-5)
    return wrong
