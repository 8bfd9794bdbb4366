"""Derivatives that nobody serves raise: none may come out as zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vmap

import tilewise as tw
from tilewise.api.parse import parse_call
from tilewise.errors import BackendError, DerivativeError
from tilewise.ops.library import pack

SHAPE = (1, 2, 8, 16)


def drawn(n: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(n))


Q, K, V = (drawn(n) for n in range(3))


def attend(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return tw.attention(x, K, V, **options)


def operator(x: torch.Tensor) -> torch.Tensor:
    problem, inputs = parse_call(x, K, V, {})
    out: torch.Tensor = torch.ops.tilewise.attention(*pack(problem, inputs, "auto"))[0]
    return out


def operator_gradient(x: torch.Tensor) -> torch.Tensor:
    problem, inputs = parse_call(Q, K, V, {})
    packed = pack(problem, inputs, "auto")
    out, lse = torch.ops.tilewise.attention(*packed)
    dq: torch.Tensor = torch.ops.tilewise.attention_backward(out, lse, x, None, [True] * 3 + [False] * 2, *packed)[0]
    return dq


def squares(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: function(x).pow(2).sum()


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "third derivative": ("third", lambda: grad(squares(grad(squares(grad(squares(attend))))))(Q)),
    "third along a direction": ("forward-mode", lambda: jvp(grad(squares(grad(squares(attend)))), (Q,), (Q,))),
    "forward over forward": ("forward-mode", lambda: jacfwd(jacfwd(lambda x: attend(x).sum()))(Q)),
    "slopes": ("slopes", lambda: jvp(lambda x: attend(Q, bias=tw.alibi(x)), (drawn(6, 2),), (drawn(7, 2),))),
    "the operator's backward": ("forward-mode", lambda: jvp(operator_gradient, (Q,), (Q,))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    message, attempt = REFUSED[name]
    with pytest.raises(DerivativeError, match=message):
        attempt()


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_holds_no_forward_mode() -> None:
    """Where the graph may break, the call runs eagerly, as it should; where it may not, the error says why."""
    expected = jvp(attend, (Q,), (K,))[1]

    def derive(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return jvp(attend, (x,), (t,))[1]

    with pytest.raises(Exception, match="forward-mode"):
        torch.compile(derive, backend="eager", fullgraph=True)(Q, K)
    assert torch.equal(torch.compile(derive, backend="eager")(Q, K), expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_call_sees_dual_tensors() -> None:
    compiled = torch.compile(attend, backend="aot_eager")
    compiled(Q)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(compiled(forward_ad.make_dual(Q, K))).tangent
    assert torch.equal(found, jvp(attend, (Q,), (K,))[1])


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_call_has_no_double_backward() -> None:
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q = Q.clone().requires_grad_()
    (first,) = torch.autograd.grad(compiled(q).pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


def test_a_backend_asked_for_serves_the_derivative_itself() -> None:
    with pytest.raises(BackendError, match="aten has no jvp"):
        jvp(lambda x: attend(x, backend="aten"), (Q,), (Q,))
    with pytest.raises(BackendError, match="aten has no"):
        grad(squares(grad(squares(lambda x: attend(x, backend="aten")))))(Q)


def test_what_has_no_tangent_is_served() -> None:
    expected = tw.attention(Q, K, V)
    with forward_ad.dual_level():
        assert torch.equal(tw.attention(Q, K, V), expected)
    _, tangent = jvp(lambda x: tw.attention(Q, K, V) * x, (Q,), (Q,))
    assert torch.equal(tangent, expected * Q)
    assert torch.equal(vmap(lambda x: tw.attention(Q, K, V) * x)(Q[None])[0], expected * Q)
    assert torch.equal(grad(lambda x: (tw.attention(x.detach(), K, V) * x).sum())(Q), expected)


def test_the_operator_has_forward_mode() -> None:
    expected = jvp(attend, (Q,), (K,))[1]
    assert torch.equal(jvp(operator, (Q,), (K,))[1], expected) and expected.abs().max() > 0
    with forward_ad.dual_level():
        assert torch.equal(forward_ad.unpack_dual(operator(forward_ad.make_dual(Q, K))).tangent, expected)
        with pytest.raises(DerivativeError, match="graph"):
            operator(forward_ad.make_dual(Q.clone().requires_grad_(), K))
