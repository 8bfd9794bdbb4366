"""Derivatives that do not exist yet are refused: none may come out as zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise.errors import DerivativeError

SHAPE = (1, 2, 8, 16)
Call = Callable[[torch.Tensor], Any]


def drawn(n: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(n))


Q, K, V = (drawn(n) for n in range(3))
PACKED, CU = drawn(3, 8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
CALLS: dict[str, tuple[torch.Tensor, Call]] = {
    "q": (Q, lambda x: tw.attention(x, K, V)),
    "k": (K, lambda x: tw.attention(Q, x, V)),
    "v": (V, lambda x: tw.attention(Q, K, x)),
    "lse": (Q, lambda x: tw.attention(x, K, V, return_lse=True)[1]),
    "bshd": (Q, lambda x: tw.attention(x, K, V, layout="bshd")),
    "bias": (drawn(4, 8, 8), lambda x: tw.attention(Q, K, V, bias=x)),
    "sinks": (drawn(5, 2), lambda x: tw.attention(Q, K, V, sinks=x)),
    "slopes": (drawn(6, 2).abs(), lambda x: tw.attention(Q, K, V, bias=tw.alibi(x))),
    "packed": (PACKED, lambda x: tw.attention_varlen(x, PACKED, PACKED, CU)),
    "sdpa": (Q, lambda x: tw.sdpa(x, K, V)),
    "sdpa mask": (drawn(4, 8, 8), lambda x: tw.sdpa(Q, K, V, attn_mask=x)),
    "module": (drawn(7, 1, 8, 32), tw.nn.Attention(32, 2)),
}


@pytest.fixture(autouse=True)
def remembered() -> None:
    """Calls like these have been seen: the short way must see what makes them others."""
    for x, call in CALLS.values():
        for _ in range(2):
            with torch.no_grad():
                call(x)


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("needs_grad", [False, True])
def test_dual_tensors_are_refused(name: str, needs_grad: bool) -> None:
    x, call = CALLS[name]
    x = x.clone().requires_grad_(needs_grad and name != "slopes")
    with forward_ad.dual_level(), pytest.raises(DerivativeError, match="forward-mode"):
        call(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("name", list(CALLS))
def test_functional_transforms_are_refused(name: str) -> None:
    x, call = CALLS[name]
    with pytest.raises(DerivativeError, match="forward-mode"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    with pytest.raises(DerivativeError, match="forward-mode"):
        torch.func.jacfwd(call)(x)


def test_more_of_them() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return tw.attention(x, K, V)

    attempts: dict[str, Callable[[], Any]] = {
        "linearize": lambda: torch.func.linearize(attend, Q),
        "hessian": lambda: torch.func.hessian(lambda x: attend(x).sum())(Q),
        "jvp of grad": lambda: torch.func.jvp(torch.func.grad(lambda x: attend(x).sum()), (Q,), (Q,)),
        "jvp of vmap": lambda: torch.func.jvp(torch.func.vmap(attend), (Q[None],), (Q[None],)),
        "vmap of jvp": lambda: torch.func.vmap(lambda t: torch.func.jvp(attend, (Q,), (t,)))(Q[None]),
        "grad": lambda: torch.func.grad(lambda x: attend(x).sum())(Q),
        "vmap": lambda: torch.func.vmap(attend)(Q[None]),
        "compiled": lambda: torch.compile(lambda x, t: torch.func.jvp(attend, (x,), (t,)), backend="eager")(Q, Q),
    }
    for name, attempt in attempts.items():
        with pytest.raises(DerivativeError):
            attempt()
            raise AssertionError(name)


def test_a_tangent_of_the_upstream_gradient_is_refused() -> None:
    q = Q.clone().requires_grad_()
    with forward_ad.dual_level():
        out = tw.attention(q, K, V)
        with pytest.raises(DerivativeError, match="forward-mode"):
            torch.autograd.grad(out, q, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_a_compiled_call_sees_dual_tensors() -> None:
    compiled = torch.compile(lambda x: tw.attention(x, K, V), backend="aot_eager")
    compiled(Q)
    with forward_ad.dual_level(), pytest.raises(DerivativeError, match="forward-mode"):
        compiled(forward_ad.make_dual(Q, Q))


def test_what_has_no_tangent_is_served() -> None:
    expected = tw.attention(Q, K, V)
    with forward_ad.dual_level():
        assert torch.equal(tw.attention(Q, K, V), expected)
    _, tangent = torch.func.jvp(lambda x: tw.attention(Q, K, V) * x, (Q,), (Q,))
    assert torch.equal(tangent, expected * Q)
    assert torch.equal(torch.func.vmap(lambda x: tw.attention(Q, K, V) * x)(Q[None])[0], expected * Q)
    assert torch.equal(torch.func.grad(lambda x: (tw.attention(x.detach(), K, V) * x).sum())(Q), expected)


def test_replaced_sdpa_has_its_derivatives() -> None:
    """There a call that we refuse is SDPA's."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, K, V)

    with sdpa_kernel(SDPBackend.MATH):  # torch's only one that has them
        expected = torch.func.jvp(attend, (Q,), (K,))[1]
        with tw.replace_sdpa() as routed:
            found = torch.func.jvp(attend, (Q,), (K,))[1]
    assert expected.abs().max() > 0 and torch.allclose(found, expected) and sum(routed.fallbacks.values()) == 1
