"""Tensor subclasses: those that say what they mean are served, those whose memory may mean anything are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.nn.attention.bias import causal_upper_left

import tilewise as tw
from tilewise.errors import ArgumentTypeError

S = 12


class Strange(torch.Tensor):
    """Means something else than its memory, and tells only functions it knows."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


class Marked(torch.Tensor):
    """No more than its memory."""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


Q, X = drawn(1, 2, S, 16), drawn(S, 2, 16)
IDS, CU = torch.arange(S, dtype=torch.int32) // 5, torch.tensor([0, 5, S], dtype=torch.int32)
BOOLEANS = torch.ones(S, S, dtype=torch.bool).tril()
CALLS: dict[str, tuple[torch.Tensor, Callable[[Any], Any]]] = {
    "q": (Q, lambda x: tw.attention(x, Q, Q)),
    "k": (Q, lambda x: tw.attention(Q, x, Q)),
    "v": (Q, lambda x: tw.attention(Q, Q, x)),
    "bias": (drawn(S, S), lambda x: tw.attention(Q, Q, Q, bias=x)),
    "slopes": (drawn(2).abs(), lambda x: tw.attention(Q, Q, Q, bias=tw.alibi(x))),
    "sinks": (drawn(2), lambda x: tw.attention(Q, Q, Q, sinks=x)),
    "seed": (torch.tensor(3), lambda x: tw.attention(Q, Q, Q, dropout_p=0.5, seed=x)),
    "mask": (BOOLEANS, lambda x: tw.attention(Q, Q, Q, mask=x)),
    "dense": (BOOLEANS, lambda x: tw.attention(Q, Q, Q, mask=tw.causal() | tw.dense(x))),
    "ids": (IDS, lambda x: tw.attention(Q, Q, Q, mask=tw.documents(x))),
    "lengths": (torch.tensor([5]), lambda x: tw.attention(Q, Q, Q, mask=tw.key_padding(x))),
    "packed q": (X, lambda x: tw.attention_varlen(x, X, X, CU)),
    "cu_seqlens_q": (CU, lambda x: tw.attention_varlen(X, X, X, x, CU)),
    "cu_seqlens_k": (CU, lambda x: tw.attention_varlen(X, X, X, CU, x)),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_unknown_ones_are_refused(name: str) -> None:
    x, call = CALLS[name]
    expected = call(x)
    with pytest.raises(ArgumentTypeError, match=r"Strange.*as_subclass\(torch\.Tensor\)"):
        call(x.as_subclass(Strange))
    assert torch.equal(call(x.as_subclass(Marked)).as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("name", ["q", "bias", "mask"])
def test_compiled_calls_refuse_them_too(name: str) -> None:
    x, call = CALLS[name]
    with pytest.raises(ArgumentTypeError, match=r"Strange.*as_subclass\(torch\.Tensor\)"):
        torch.compile(call, backend="eager")(x.as_subclass(Strange))


def test_a_causal_bias_is_no_bias() -> None:
    """Its memory was never written to."""
    with pytest.raises(ArgumentTypeError, match="CausalBias"):
        tw.attention(Q, Q, Q, bias=causal_upper_left(S, S))


def test_parameters_and_buffers_are_plain() -> None:
    for made in (torch.nn.Parameter(Q, requires_grad=False), torch.nn.Buffer(Q)):
        assert torch.equal(tw.attention(made, made, made), tw.attention(Q, Q, Q))


def test_fake_and_functional_tensors_are_served() -> None:
    expected = tw.attention(Q, Q, Q, return_lse=True)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(Q)
        mask = tw.dense(mode.from_tensor(BOOLEANS))
        for given in (None, mask):
            results = tw.attention(fake, fake, fake, mask=given, return_lse=True)
            assert [x.shape for x in results] == [x.shape for x in expected]
    with FunctionalTensorMode():
        functional = FunctionalTensor.to_functional(Q)
        found = tw.attention(functional, functional, functional)
        assert torch.equal(torch._from_functional_tensor(found.elem), expected[0])  # type: ignore[attr-defined]


def test_a_fake_mask_of_real_queries_is_not_read() -> None:
    """It has no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(BOOLEANS)
    assert isinstance(tw.attention(Q, Q, Q, mask=fake), FakeTensor)
