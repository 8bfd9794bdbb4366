"""Under a default device of the user's, memory of ours still lies where the tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.conformance.harness import BACKENDS, attention, attention_varlen

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "causal": {"mask": tw.causal()},
    "padding": {"mask": tw.key_padding([5, 70])},
    "documents": {"mask": tw.documents(torch.arange(70) // 9)},
    "dense": {"mask": torch.ones(70, 70, dtype=torch.bool).tril()},
    "bias": {"bias": torch.randn(70, 70)},
    "sinks": {"sinks": torch.ones(2)},
    "alibi": {"bias": tw.alibi(torch.ones(2))},
    "dropout": {"dropout_p": 0.5, "seed": 3},
    "softcap": {"softcap": 3.0},
    "halves": {"dtype": torch.bfloat16},
    "doubles": {"dtype": torch.float64},
}


@contextmanager
def elsewhere(how: str) -> Iterator[None]:
    """Without a GPU: the meta device stands for any other one."""
    if how == "context":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def results(backend: str, settings: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    options = dict(settings)
    kind = {"dtype": options.pop("dtype", torch.float32), "device": "cpu"}
    g = torch.Generator(device="cpu").manual_seed(0)
    q, k, v = (torch.randn(2, 2, 70, 16, generator=g, device="cpu").to(**kind).requires_grad_() for _ in range(3))
    found = attention(q, k, v, backend=backend, **options)
    found = found if isinstance(found, tuple) else (found,)
    leaves = [q, k, v]
    bias = options.get("bias")
    return (*found, *torch.autograd.grad(found[0].sum(), leaves)) if not isinstance(bias, torch.Tensor) else found


@pytest.mark.parametrize("how", ["context", "default"])
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_calls_and_gradients(name: str, backend: str, how: str) -> None:
    with elsewhere(how):
        found = results(backend, SETTINGS[name])
    expected = results(backend, SETTINGS[name])
    assert all(a.device.type == "cpu" and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_bias_and_packed_batches(backend: str) -> None:
    def both() -> list[torch.Tensor]:
        g = torch.Generator(device="cpu").manual_seed(0)
        q = torch.randn(1, 2, 70, 16, generator=g, device="cpu")
        bias = torch.randn(70, 70, generator=g, device="cpu").requires_grad_()
        cu = torch.tensor([0, 20, 70], device="cpu")
        grads = torch.autograd.grad(attention(q, q, q, bias=bias, backend=backend).sum(), bias)
        packed = q[0].transpose(0, 1)
        return [*grads, attention_varlen(packed, packed, packed, cu, backend=backend)]

    with torch.device("meta"):
        found = both()
    assert all(torch.equal(a, b) for a, b in zip(found, both(), strict=True))


@pytest.mark.parametrize("threads", [1, 4])
def test_one_query_split_over_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        g = torch.Generator().manual_seed(0)
        q, k = torch.randn(1, 1, 1, 32, generator=g), torch.randn(1, 1, 5000, 32, generator=g)
        with torch.device("meta"):
            found = tw.attention(q, k, k, mask=tw.causal())
        assert torch.equal(found, tw.attention(q, k, k, mask=tw.causal()))
    finally:
        torch.set_num_threads(before)


def test_looking_at_a_call() -> None:
    q = torch.randn(1, 2, 20, 16)
    out = tw.attention(q, q, q)
    with torch.device("meta"):
        assert tw.certify(q, q, q, out).ok
        assert "cpu" in str(tw.explain(q, q, q))
