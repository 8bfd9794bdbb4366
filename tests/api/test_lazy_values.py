"""Tensors whose values are not in their memory: torch may negate, or mean zero, by a bit, and kernels read memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.conformance.harness import BACKENDS, attention, attention_varlen

SHAPE = (2, 2, 12, 16)
backends = pytest.mark.parametrize("backend", BACKENDS)
lazily = pytest.mark.parametrize("lazy", ["negated", "zero"])


def drawn(n: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(n))


def pair(lazy: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values by a bit, and in memory."""
    found = torch._neg_view(x) if lazy == "negated" else torch._efficientzerotensor(x.shape, dtype=x.dtype)
    assert found.is_neg() or found._is_zerotensor()
    return found, -x if lazy == "negated" else torch.zeros_like(x)


def arguments() -> dict[str, torch.Tensor]:
    shapes = {"q": SHAPE, "k": SHAPE, "v": SHAPE, "bias": (12, 12), "sinks": (2,), "slopes": (2,), "seed": ()}
    found = {name: drawn(n, *shape) if shape else drawn(n, 1)[0] for n, (name, shape) in enumerate(shapes.items())}
    return found | {"seed": torch.tensor(7), "slopes": found["slopes"].abs()}


def call(backend: str, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """out, lse and gradients of a call in which everything plays a part, and of one with ALiBi."""
    leaves = {name: x if not x.is_floating_point() else x.detach().requires_grad_() for name, x in given.items()}
    q, k, v = (leaves[name] for name in "qkv")
    results: list[torch.Tensor] = []
    for bias in (leaves["bias"], tw.alibi(leaves["slopes"].detach())):
        wanted = [q, k, v, leaves["sinks"], *([bias] if isinstance(bias, torch.Tensor) else [])]
        options: dict[str, Any] = {"bias": bias, "sinks": leaves["sinks"], "dropout_p": 0.2, "seed": leaves["seed"]}
        out, lse = attention(q, k, v, return_lse=True, backend=backend, **options)
        results += [out, lse, *torch.autograd.grad((out.sum(), lse.sum()), wanted)]
    return tuple(x.detach() for x in results)


@backends
@lazily
@pytest.mark.parametrize("name", list(arguments()))
def test_of_any_argument(name: str, lazy: str, backend: str) -> None:
    given = arguments()
    by_bit, in_memory = pair(lazy, given[name])
    found, expected = (call(backend, given | {name: x}) for x in (by_bit, in_memory))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@backends
@lazily
@pytest.mark.parametrize("of", ["dout", "dlse", "both"])
def test_of_what_comes_back(of: str, lazy: str, backend: str) -> None:
    q, k, v = (drawn(n).requires_grad_() for n in range(3))
    results = attention(q, k, v, return_lse=True, backend=backend)
    dout, dlse = pair(lazy, drawn(3)), pair(lazy, drawn(4, *SHAPE[:3]))
    chosen = {"dout": (results[0], dout), "dlse": (results[1], dlse)}
    used = [chosen[of]] if of != "both" else list(chosen.values())
    by_bit, in_memory = (
        torch.autograd.grad([r for r, _ in used], (q, k, v), [x[i] for _, x in used], retain_graph=True, allow_unused=True)
        for i in range(2)
    )
    for a, b in zip(by_bit, in_memory, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


def test_a_real_part_of_a_conjugate() -> None:
    """How such tensors come about."""
    q = torch.complex(drawn(0), drawn(1)).conj().imag
    assert q.is_neg()
    for _ in range(2):
        assert torch.equal(tw.attention(q, q, q), tw.attention(*[q.resolve_neg()] * 3))


@backends
def test_of_masks_and_packing(backend: str) -> None:
    """Integers are negated the same way."""
    q, x = drawn(0), drawn(1, 12, 2, 16)
    ids = torch.arange(12, dtype=torch.int32) // 5
    tensors: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = [
        (-ids, lambda i: attention(q, q, q, mask=tw.documents(i), backend=backend)),
        (torch.tensor([-3, -9]), lambda i: attention(q, q, q, mask=tw.key_padding(i), backend=backend)),
        (torch.tensor([-3, -9]), lambda i: attention(q, q, q, mask=tw.causal(offset=i), backend=backend)),
        (torch.tensor([0, -5, -12], dtype=torch.int32), lambda i: attention_varlen(x, x, x, i, backend=backend)),
    ]
    for stored, call in tensors:
        lazy = torch._neg_view(stored)
        assert torch.equal(call(lazy), call(-stored))


@backends
def test_zeros_after_a_remembered_call(backend: str) -> None:
    q = drawn(0)
    attention(q, q, q, backend=backend)
    zero = torch._efficientzerotensor(SHAPE)
    assert torch.equal(attention(zero, q, zero, backend=backend), torch.zeros(SHAPE))


def test_nested_tensors_after_a_remembered_call() -> None:
    """Torch's guard throws where nothing can be caught; it must not be asked about them."""
    q = drawn(0)
    for _ in range(2):
        tw.attention(q, q, q)
    nested = torch.nested.nested_tensor([drawn(1, 2, 12, 16), drawn(2, 2, 9, 16)])
    jagged = torch.nested.nested_tensor([drawn(1, 12, 2, 16), drawn(2, 9, 2, 16)], layout=torch.jagged)
    for x in (nested, jagged):
        for place in range(3):
            with pytest.raises(tw.TilewiseError, match="nested"):
                tw.attention(*(x if i == place else q for i in range(3)))
    for bad in ({"bias": nested}, {"sinks": nested}, {"mask": tw.dense(nested.bool())}):
        with pytest.raises(tw.TilewiseError, match="nested"):
            tw.attention(q, q, q, **bad)  # type: ignore[arg-type]


@backends
def test_slopes_are_as_precise_as_the_problem(backend: str) -> None:
    """ALiBi's slopes 2^(-8i/n) are no fp32 numbers; over 300 positions rounding them costs 1e-5 of a weight."""
    q, k, v = (drawn(n, 1, 3, 300, 8).double() for n in range(3))
    slopes = 2.0 ** (-8.0 * torch.arange(1, 4, dtype=torch.float64) / 3)
    found = attention(q, k, v, bias=tw.alibi(slopes), backend=backend)
    at = torch.arange(300)
    bias = -slopes[:, None, None] * (at[:, None] - at).abs()
    expected = torch.softmax(q @ k.mT / 8**0.5 + bias, -1) @ v
    # each of 300 terms is rounded a few times, and the largest logit is about 300
    assert (found - expected).abs().max() < 4 * 300 * torch.finfo(torch.float64).eps * v.abs().max()
