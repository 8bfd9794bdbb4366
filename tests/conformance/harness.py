"""How a backend is held to the fp64 oracle; the one list of backends that tests run over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.conformance.cases import Built, inside
from tests.numerics import checks
from tilewise import dispatch
from tilewise.backends.base import Grads
from tilewise.errors import BackendError

BACKENDS = ["cpu", "aten", "tiled", "reference"]
COMPLETE = {"tiled"}
"""Backends that must serve every case."""


def serves(built: Built, backend: str) -> tuple[str, ...]:
    """The backend's reasons against the call, none if it serves forward and backward."""
    for backward in (False, True):
        verdict = dispatch.judge(backend, built.problem, built.inputs, backward=backward)
        if not verdict.ok:
            assert backend not in COMPLETE, verdict.reasons
            assert verdict.reasons, "a refusal must say why"
            return verdict.reasons
    return ()


def skip_unless_served(built: Built, backend: str) -> None:
    if reasons := serves(built, backend):
        pytest.skip("; ".join(reasons))


def attention(*tensors: torch.Tensor, backend: str, **options: Any) -> Any:
    """tw.attention; the test is skipped where an incomplete backend says that it cannot."""
    return _asked(tw.attention, tensors, backend, options)


def attention_varlen(*tensors: torch.Tensor, backend: str, **options: Any) -> Any:
    return _asked(tw.attention_varlen, tensors, backend, options)


def _asked(call: Callable[..., Any], tensors: tuple[torch.Tensor, ...], backend: str, options: dict[str, Any]) -> Any:
    try:
        return call(*tensors, backend=backend, **options)
    except BackendError as error:
        if backend in COMPLETE or backend not in BACKENDS:
            raise
        pytest.skip("; ".join(error.verdicts[backend]))


def gradients(built: Built, grads: tuple[torch.Tensor, ...]) -> Grads:
    """Gradients of the leaves, brought to the inside layout."""
    dq, dk, dv, *rest = grads
    dq, dk, dv = (inner(built, x) for x in (dq, dk, dv))
    has_bias = built.problem.bias is not None
    dbias = rest[0].reshape(built.problem.bias) if has_bias and built.problem.bias else None
    return Grads(dq, dk, dv, dbias, rest[has_bias] if built.problem.sinks else None)


def inner(built: Built, x: torch.Tensor) -> torch.Tensor:
    """A tensor in the user's layout as (B, H, S, D)."""
    if built.packed is not None:
        return x.transpose(0, 1).unsqueeze(0)
    return x.transpose(1, 2) if built.options.get("layout") == "bshd" else x


def excesses(built: Built, backend: str, *, lse_gradient: bool = False) -> list[checks.Excess]:
    """What forward and backward return outside their bounds."""
    out, lse = built.call(backend)
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g).to(out)
    dlse = torch.randn(lse.shape, generator=g).to(lse) if lse_gradient else None
    zeros = torch.zeros_like(lse)
    grads = torch.autograd.grad([out, lse], built.leaves, [dout, zeros if dlse is None else dlse])
    out, dout = inner(built, out), inner(built, dout)
    if built.packed is not None:
        lse, dlse = lse.unsqueeze(0), None if dlse is None else dlse.unsqueeze(0)
    return [
        *checks.check_forward(built.problem, built.inputs, out, lse),
        *checks.check_backward(built.problem, built.inputs, dout, dlse, gradients(built, grads)),
    ]


def exchanged(built: Built, **given: torch.Tensor) -> Built:
    """The same call with other tensors: q, k, v, or options such as bias."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    qkv = {name: leaves.pop(name, getattr(built, name)) for name in ("q", "k", "v")}
    options: dict[str, Any] = {**built.options, **leaves}
    problem, inputs = inside(*qkv.values(), built.packed, options)
    return replace(built, **qkv, options=options, problem=problem, inputs=inputs)
