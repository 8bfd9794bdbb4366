"""Ranks that do something wrong, and what every rank then says."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import tilewise as tw
from tilewise.distributed.exchange import Link
from tilewise.errors import TilewiseError

LENGTH = 40


def qkv(plan: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros((1, heads, plan.local_tokens(), 8), dtype=dtype) for heads in (4, 2, 2)]


def a_plan(mask: tw.Mask = tw.causal(), **features: Any) -> Any:  # noqa: B008 - a value
    settings = {"heads": 4, "kv_heads": 2, "seqlen": LENGTH, "head_dim": 8, "dtype": "float32", "mask": mask}
    return tw.distributed.plan(tw.Problem.of(**{**settings, **features}), shards="contiguous")


def said(call: Any) -> str:
    """The error of a call, with its kind."""
    try:
        call()
    except TilewiseError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_mask(rank: int) -> str:
    plan = a_plan(tw.causal() & tw.window(8) if rank == 1 else tw.causal())
    return said(lambda: tw.distributed.attention(*qkv(plan), plan))


def other_length(rank: int) -> str:
    plan = a_plan(seqlen=LENGTH + rank)
    return said(lambda: tw.distributed.attention(*qkv(plan), plan))


def other_option(rank: int) -> str:
    plan = a_plan()
    return said(lambda: tw.distributed.attention(*qkv(plan), plan, softcap=1.0 + rank))


def wrong_shard(rank: int) -> str:
    plan = a_plan()
    return said(lambda: tw.distributed.attention(*(x[:, :, rank:] for x in qkv(plan)), plan))


def wrong_dtype(rank: int) -> str:
    plan = a_plan()
    return said(lambda: tw.distributed.attention(*qkv(plan, torch.bfloat16 if rank else torch.float32), plan))


def later(rank: int) -> str:
    """What is wrong with a call after one that was right, three times over."""
    plan = a_plan()
    tw.distributed.attention(*qkv(plan), plan)
    found = [
        said(lambda: tw.distributed.attention(*(x[:, :, rank:] for x in qkv(plan)), plan)),
        said(lambda: tw.distributed.attention(*qkv(plan, torch.bfloat16 if rank else torch.float32), plan)),
        said(lambda: tw.distributed.attention(*qkv(plan), plan, softcap=float(rank))),
    ]
    return "\n".join(found)


def generation(rank: int) -> str:
    plan = a_plan()
    q, k, v = qkv(plan)
    return said(lambda: tw.distributed.attention(q[:, :, :1], k, v, plan))


def a_mask_of_its_own(rank: int) -> str:
    plan = a_plan()
    return said(lambda: tw.distributed.attention(*qkv(plan), plan, mask=tw.causal()))  # type: ignore[call-overload]


def no_sinks(rank: int) -> str:
    plan = a_plan(sinks=True)
    return said(lambda: tw.distributed.attention(*qkv(plan), plan))


def wrong_bias(rank: int) -> str:
    plan = a_plan(bias=(1, 4, LENGTH, LENGTH))
    return said(lambda: tw.distributed.attention(*qkv(plan), plan, bias=torch.zeros(1, 4, LENGTH, LENGTH)))


def after_all_that(rank: int) -> str:
    """A plan still works when others have failed."""
    plan = a_plan()
    return said(lambda: tw.distributed.attention(*qkv(plan), plan))


FAULTS = {
    one.__name__: one
    for one in (
        *(other_mask, other_length, other_option, wrong_shard, wrong_dtype, later, generation),
        *(a_mask_of_its_own, no_sinks, wrong_bias, after_all_that),
    )
}


def all_faults(rank: int) -> dict[str, str]:
    return {name: fault(rank) for name, fault in FAULTS.items()}


def late(rank: int, how: str, backward: bool) -> tuple[str, float]:
    """The last rank dies or stands still before its first message of the last stage, or is killed before the call; what the
    first one says, and after how many seconds."""
    plan = a_plan()
    leaves = [x.requires_grad_() for x in qkv(plan)]
    tw.distributed.attention(*leaves, plan).sum().backward()  # all is well, and kernels are there
    out = tw.distributed.attention(*leaves, plan) if backward else None
    if rank == plan.ranks - 1:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        start = Link.start

        def stop(self: Link, label: str, *args: Any) -> Any:
            if "stage 1" in label:
                if how == "dies":
                    os._exit(1)
                time.sleep(60)
            return start(self, label, *args)

        Link.start = stop  # type: ignore[method-assign]
    began = time.perf_counter()
    wrong = said(lambda: out.sum().backward() if out is not None else tw.distributed.attention(*leaves, plan))
    seconds = time.perf_counter() - began
    if rank:
        time.sleep(5)  # so that the first rank meets one that is lost, and not one that has found that out and left
    return wrong, seconds
