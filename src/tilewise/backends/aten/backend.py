"""torch's own CPU flash kernel, where it is the faster one: half precision on machines whose matrix units it can use.

It knows one mask, the top-left causal triangle, and no gradient through the log-sum-exp. The first is enough for full attention
and for causal attention of as many queries as keys; the second is put together from the kernel itself:

    dLSE reaches the scores as dS = P ∘ dLSE, so dQ = scale · dLSE ∘ (P K) and dK = scale · Pᵀ (dLSE ∘ Q):
    the first is attention with K as values, the second the values' gradient of that attention for dO = dLSE ∘ Q.

In half precision only its output is exact. Where it uses matrix units its exponentials have 20 bits, enough for an output of 11
and for weights in a backward, not for a log-sum-exp of 24: halves are served where nobody gets to see that. And its backward adds
up dK and dV in half precision, one rounding for every block of queries: gradients of halves are left to others.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.backends.aten import plan
from tilewise.backends.base import Backend, BackwardInputs, Grads, Inputs, Verdict, cpu_only
from tilewise.hardware.probe import probe_cpu
from tilewise.problem import Problem

_OPERATORS = torch.ops.aten
_forward: Any = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None)  # cheaper to call than the operator
_forward = _forward or _OPERATORS._scaled_dot_product_flash_attention_for_cpu.default
_backward = _OPERATORS._scaled_dot_product_flash_attention_for_cpu_backward.default

ADVANTAGE = 1.5
"""How much faster than fp32 a half-precision product must be: without tiles the CPU backend computes halves at fp32's speed, and
torch's attention reaches a smaller share of its product's speed than of fp32's."""
PROBE_SIDE = 768


class AtenBackend(Backend):
    name = "aten"

    def usable(self, device: str) -> Verdict:
        return Verdict.of(cpu_only(device))

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        return plan.supports(problem, probe_cpu(), backward=backward)

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        spec = probe_cpu()
        if spec.has_amx and find_spec("llvmlite") is None:  # the cpu backend has no kernels to use it
            spec = replace(spec, isa_flags=tuple(flag for flag in spec.isa_flags if not flag.startswith("amx")))
        reason = plan.declines(problem, spec, backward=backward)
        if reason is not None:
            return reason
        gain = half_gain(problem.dtype)
        if gain < ADVANTAGE:
            return (
                f"torch multiplies {problem.dtype} matrices {gain:.2f} times as fast as fp32 ones here, measured just now; "
                f"below {ADVANTAGE} the cpu backend is faster"
            )
        return None

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v = (_adjacent(x) for x in (inputs.q, *_reached(problem, inputs.k, inputs.v)))
        out, lse = _forward(q, k, v, 0.0, _causal(problem), scale=problem.scale)
        return out, lse.contiguous() if problem.needs_lse or problem.needs_grad else lse

    def launcher(self, problem: Problem, inputs: Inputs) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        if any(x.stride(-1) != 1 for x in inputs[:3]) or _beyond(problem):
            return None
        causal, scale = _causal(problem), problem.scale

        def launch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = _forward(q, k, v, 0.0, causal, scale=scale)[0]
            return out

        return launch

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        out, lse, dout, dlse, _ = given
        causal, scale = _causal(problem), problem.scale
        # the kernel's backward wants as many key heads as query heads
        keys = _spread(problem, *_reached(problem, inputs.k, inputs.v))
        q, k, v, out, dout = (_adjacent(x) for x in (inputs.q, *keys, out, dout))
        dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
        if dlse is not None:
            pk, _ = _forward(q, k, k, 0.0, causal, scale=scale)
            weighted = (dlse.unsqueeze(-1) * q).to(q.dtype)
            _, _, extra = _backward(weighted, q, k, k, pk, lse, 0.0, causal, scale=scale)
            dq = (dq + scale * dlse.unsqueeze(-1) * pk).to(q.dtype)
            dk = dk + scale * extra
        dk, dv = _gather(problem, dk), _gather(problem, dv)
        if beyond := _beyond(problem):
            dk, dv = (pad(x, (0, 0, 0, beyond)) for x in (dk, dv))
        return Grads(dq, dk, dv)


@cache
def half_gain(dtype: str) -> float:
    """Speed of torch's half-precision product relative to fp32's, measured once per process in a few milliseconds."""
    seconds = {}
    for name in ("float32", dtype):
        x = torch.ones(PROBE_SIDE, PROBE_SIDE, dtype=getattr(torch, name), device="cpu")
        torch.mm(x, x)
        seconds[name] = min(timeit.repeat(partial(torch.mm, x, x), number=1, repeat=3))
    return seconds["float32"] / seconds[dtype]


def _causal(problem: Problem) -> bool:
    return problem.program.structure != ""


def _beyond(problem: Problem) -> int:
    """Keys at the end that no query sees: a top-left triangle ends with the last query."""
    return max(0, problem.seqlen_k - problem.seqlen_q) if _causal(problem) else 0


def _reached(problem: Problem, *keys: Tensor) -> tuple[Tensor, ...]:
    """The keys some query sees. The kernel would multiply the others by weights of 0, and 0 · NaN is NaN."""
    beyond = _beyond(problem)
    return tuple(x[:, :, : x.shape[2] - beyond] for x in keys) if beyond else keys


def _adjacent(x: Tensor) -> Tensor:
    """The kernel takes a last stride of 1 for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _spread(problem: Problem, *tensors: Tensor) -> tuple[Tensor, ...]:
    if problem.group == 1:
        return tensors
    return tuple(x.repeat_interleave(problem.group, dim=1) for x in tensors)


def _gather(problem: Problem, gradient: Tensor) -> Tensor:
    if problem.group == 1:
        return gradient
    grouped = gradient.unflatten(1, (problem.kv_heads, problem.group))
    total: Tensor = grouped.sum(dim=2, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return total.to(gradient.dtype)


backend = AtenBackend()
