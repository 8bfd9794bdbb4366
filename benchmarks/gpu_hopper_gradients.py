"""Gradients by fp64 and by other implementations, for `gpu_hopper_backward.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def normal_like(x: Any, seed: int) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(x.shape, device="cuda", generator=generator).to(x.dtype)


def exact_head(problem: Any, inputs: Any, dout: Any) -> tuple[Any, ...]:
    """dq, dk, dv of the last head of the last sequence in fp64 (of the last query head alone where heads share keys)."""
    import torch

    q, k, v, do = (x[-1, -1].double() for x in (inputs.q, inputs.k, inputs.v, dout))
    s = q @ k.T * problem.scale
    if problem.program.structure:
        (lo, hi), shift = problem.program.ints, problem.seqlen_k - problem.seqlen_q
        apart = torch.arange(k.shape[0], device="cuda")[None] - torch.arange(q.shape[0], device="cuda")[:, None] - shift
        s.masked_fill_((apart < lo) | (apart > hi), float("-inf"))
        del apart
    p = s.softmax(-1)
    del s
    dv = p.T @ do
    delta = ((p @ v) * do).sum(-1, keepdim=True)
    ds = p * (do @ v.T - delta)
    return ds @ k * problem.scale, ds.T @ q * problem.scale, dv


def error_of(grads: Any, exact: Any) -> list[float]:
    return [float((x[-1, -1].double() - y).norm() / y.norm()) for x, y in zip(grads, exact, strict=True)]


def contenders(problem: Any, inputs: Any, dout: Any, causal: bool) -> dict[str, Callable[[], Any]]:
    """Each gives (dq, dk, dv); forward passes are done before."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tilewise import dispatch
    from tilewise.backends.base import BackwardInputs

    hopper, portable = dispatch.get("hopper"), dispatch.get("triton")
    out, lse = hopper.forward(problem, inputs)
    runs: dict[str, Callable[[], Any]] = {
        "tilewise": lambda: hopper.backward(problem, inputs, BackwardInputs(out, lse, dout, None))[:3],
        "triton": lambda: portable.backward(problem, inputs, BackwardInputs(out, lse, dout, None))[:3],
    }
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=causal, enable_gqa=problem.group > 1
        )
    runs["cudnn"] = lambda: torch.autograd.grad(theirs, leaves, dout, retain_graph=True)
    try:
        from flash_attn.cute import flash_attn_func

        packed = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs[:3]]
        result = flash_attn_func(*packed, causal=causal)
        theirs4 = result[0] if isinstance(result, tuple) else result
        dout4 = dout.transpose(1, 2).contiguous()

        def fa4() -> Any:
            return [x.transpose(1, 2) for x in torch.autograd.grad(theirs4, packed, dout4, retain_graph=True)]

        fa4()
        runs["fa4"] = fa4
    except Exception as error:
        print(f"fa4: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    return runs
