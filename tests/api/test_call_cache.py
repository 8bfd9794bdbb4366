"""The call cache: a call like the last one is repeated. Everything that makes a call another one must be seen before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tilewise import dispatch
from tilewise.api import call_cache
from tilewise.backends import plans
from tilewise.backends.base import BackwardInputs, Grads, Inputs, Needs, Verdict
from tilewise.errors import ArgumentTypeError, LayoutError, TilewiseError
from tilewise.lab.bench.overhead import NullBackend
from tilewise.problem import Problem

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensors:
    g = torch.Generator().manual_seed(len(shape))
    q, k, v = (torch.randn(shape, generator=g).to(dtype) for _ in range(3))
    return q, k, v


@pytest.fixture
def qkv() -> Tensors:
    """Tensors of a shape whose plain call is cached."""
    q, k, v = drawn(1, 2, 24, 32)
    tw.attention(q, k, v)
    return q, k, v


@pytest.fixture
def misses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Says "miss" for every call that was not like the last one; the cache is empty at first."""
    seen: list[str] = []
    tensor_facts = call_cache.tensor_facts

    def watched(*args: Any) -> Any:
        seen.append("miss")
        return tensor_facts(*args)

    monkeypatch.setattr(call_cache, "tensor_facts", watched)
    monkeypatch.setattr(call_cache, "_calls", {})
    return seen


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-5)


def test_the_second_call_is_repeated(misses: list[str]) -> None:
    q, k, v = drawn(1, 2, 24, 32)
    first = tw.attention(q, k, v)
    assert misses == ["miss"]
    for x in (v, v + 1):
        assert close(tw.attention(q, k, x), F.scaled_dot_product_attention(q, k, x))
    assert torch.equal(tw.attention(q, k, v), first) and misses == ["miss"]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mask", [None, tw.causal(), tw.window(5)], ids=["full", "causal", "window"])
def test_a_repeated_call_gives_the_same(layout: str, return_lse: bool, grad: bool, mask: Any, misses: list[str]) -> None:
    q, k, v = (x.requires_grad_(grad) for x in drawn(2, 8, 8, 16))
    results = []
    for _ in range(2):
        found = tw.attention(q, k, v, mask=mask, layout=layout, return_lse=return_lse)
        results.append(found if isinstance(found, tuple) else (found,))
        if grad:
            results[-1] += torch.autograd.grad(sum(x.sum() for x in results[-1]), (q, k, v))
    assert misses == ["miss"] and len(results[0]) == 1 + return_lse + 3 * grad
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(*results, strict=True))
    axes = (1, 2) if layout == "bshd" else (1, 1)
    inside = [x.detach().transpose(*axes) for x in (q, k, v)]
    allowed = torch.ones(8, 8, dtype=torch.bool)
    if mask is not None:
        allowed = allowed.tril() & ~(allowed.tril(-5) if mask == tw.window(5) else torch.zeros_like(allowed))
    assert close(results[1][0].detach().transpose(*axes), F.scaled_dot_product_attention(*inside, attn_mask=allowed))


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q[:, :, :16],
        lambda q: q.double(),
        lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
        lambda q: torch._neg_view(q),
        lambda q: torch.nn.Parameter(q, requires_grad=False),
        lambda q: q[:1].expand(3, -1, -1, -1),
    ],
    ids=["shape", "dtype", "strides", "negation", "type", "broadcast"],
)
def test_other_tensors_are_seen(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    q, k, v = drawn(3, 2, 24, 32)
    tw.attention(q, k, v)
    others = [change(x) for x in (q, k, v)]
    assert close(tw.attention(*others), F.scaled_dot_product_attention(*(x.resolve_neg() for x in others)))
    q, k, v = drawn(3, 2, 24, 32)
    with pytest.raises(TilewiseError):
        tw.attention(q, k[:1], v)
    with pytest.raises(TilewiseError):
        tw.attention(q.to_sparse(), k, v)


def test_tensors_that_are_one(qkv: Tensors) -> None:
    q, _, _ = qkv
    assert close(tw.attention(q, q, q), F.scaled_dot_product_attention(q, q, q))


def test_grad_mode_is_seen(qkv: Tensors) -> None:
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    with torch.no_grad():
        assert not tw.attention(q, k, v).requires_grad
    assert tw.attention(q, k, v).requires_grad
    with torch.no_grad():
        assert not tw.attention(q, k, v).requires_grad
    assert not tw.attention(*qkv).requires_grad
    with torch.inference_mode():
        assert tw.attention(*qkv).is_inference()
    assert not tw.attention(*qkv).is_inference()


def test_a_call_is_cached_for_every_mode(misses: list[str]) -> None:
    q, k, v = drawn(1, 2, 24, 32)
    with torch.inference_mode():
        tw.attention(q, k, v)
    for _ in range(3):
        tw.attention(q, k, v)
    assert misses == ["miss", "miss"]
    tw.attention(q.requires_grad_(), k, v)
    for _ in range(3):
        tw.attention(q, k.requires_grad_(), v)
    assert misses == ["miss"] * 4


def test_autocast_is_seen(qkv: Tensors) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.attention(*qkv).dtype == torch.bfloat16
    assert tw.attention(*qkv).dtype == torch.float32


def test_modes_and_transforms_are_seen(qkv: Tensors) -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        tw.attention(*qkv)
    assert "tilewise.attention.default" in seen
    q, k, v = qkv
    got = torch.func.grad(lambda x: tw.attention(x, k, v).sum())(q)  # a plain call would give zeros
    own = q.detach().requires_grad_()
    (want,) = torch.autograd.grad(tw.attention(own, k, v).sum(), own)
    assert torch.allclose(got, want, atol=1e-6)


def test_subclasses_are_seen(qkv: Tensors) -> None:
    seen: list[str] = []

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            if unwraps and "tilewise" in str(function):
                args = [x.as_subclass(torch.Tensor) if isinstance(x, Named) else x for x in args]
            return super().__torch_function__(function, types, args, kwargs or {})

    q, k, v = qkv
    for unwraps in (True, False):
        seen.clear()
        # one that lets kernels at its memory has not said what that means
        with nullcontext() if unwraps else pytest.raises(ArgumentTypeError, match=r"q: got a Named.*as_subclass"):
            assert close(tw.attention(q.as_subclass(Named), k, v), tw.attention(q, k, v))
        assert any("tilewise" in name for name in seen)


def test_settings_are_seen(qkv: Tensors) -> None:
    q, k, v = qkv
    tw.attention(q, k, v, scale=1.0)
    for wrong in ({"scale": True}, {"softcap": False}, {"dropout_p": False}, {"deterministic": "no"}):
        with pytest.raises(ArgumentTypeError):
            tw.attention(q, k, v, **wrong)  # type: ignore[arg-type]
    with pytest.raises(LayoutError):
        tw.attention(q, k, v, layout="hbsd")
    plain = tw.attention(q, k, v)
    for other in ({"scale": 2.0}, {"softcap": 1.0}, {"mask": tw.causal()}, {"mask": tw.prefix(7)}):
        assert not torch.equal(tw.attention(q, k, v, **other), plain)  # type: ignore[arg-type]
    with pytest.raises(TilewiseError):
        tw.attention(q, k, v, backend="no such backend")
    assert isinstance(tw.attention(q, k, v, return_lse=True), tuple)


def test_threads_may_change(qkv: Tensors) -> None:
    q, k, v = drawn(4, 8, 128, 64)
    expected, threads = tw.attention(q, k, v), torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert close(tw.attention(q, k, v), expected)
    finally:
        torch.set_num_threads(threads)
    assert close(tw.attention(q, k, v), expected)


def test_calls_of_many_kinds_take_turns() -> None:
    """The arguments of a call stay where the next one like it finds them; whatever comes between must not be taken for it."""
    a, b = drawn(1, 2, 24, 32), drawn(2, 3, 40, 64, dtype=torch.float64)
    c = drawn(1, 2, 24, 32, dtype=torch.bfloat16)
    rows = [x.transpose(1, 2).contiguous() for x in a]

    def gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q.clone().requires_grad_()
        return torch.autograd.grad(tw.attention(q, k, v).sum(), q)[0]

    calls: list[Callable[[], torch.Tensor]] = [
        lambda: tw.attention(*a),
        lambda: tw.attention(*b),
        lambda: tw.attention(*c),
        lambda: tw.attention(*a, mask=tw.causal()),
        lambda: tw.attention(*a, return_lse=True)[1],
        lambda: tw.attention(*b, return_lse=True)[0],
        lambda: tw.attention(*rows, layout="bshd"),
        lambda: gradient(*a),
        lambda: gradient(*b),
    ]
    alone = []
    for call in calls:
        call_cache._calls.clear()
        alone.append(call())
    order = torch.randint(len(calls), (300,), generator=torch.Generator().manual_seed(0)).tolist()
    for i in order:
        assert torch.equal(calls[i](), alone[i]), i


def test_memory_that_was_refused_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = pytest.importorskip("tilewise.backends.cpu.schedule")
    q, k, v = drawn(1, 2, 24, 32)
    expected = [tw.attention(q, k, v, backend="cpu") for _ in range(3)][-1]  # the last is repeated
    monkeypatch.setattr(schedule.thread, "free", [])  # a thread that has no memory yet

    def refused(scratch: Any, size: int) -> int:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(schedule.ThreadScratch, "reserve", refused)
        tw.attention(q, k, v, backend="cpu")
    assert torch.equal(tw.attention(q, k, v, backend="cpu"), expected)


class Watching(NullBackend):
    """Serves what is aligned, and notes what it was asked."""

    name = "watching"

    def __init__(self) -> None:
        self.asked: list[Problem] = []

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        odd = inputs is not None and inputs.q.data_ptr() % 16
        return Verdict.of("an odd address" if odd else None)

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        return None

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(problem)
        return super().forward(problem, inputs)

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        assert isinstance(given.needs, Needs)
        return Grads(inputs.q, inputs.k, inputs.v)


backend = Watching()
dispatch_load = dispatch._load


def test_registered_backends_and_addresses_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.randn(3 * 24 * 32 + 8)
    first = -memory.data_ptr() % 16 // 4
    even, odd = (memory[i : i + 24 * 32].view(1, 1, 24, 32) for i in (first, first + 1))
    _, k, v = drawn(1, 1, 24, 32)
    tw.attention(even, k, v)
    registry = dict(dispatch.REGISTRY)
    for module in (dispatch, plans):
        monkeypatch.setattr(module, "REGISTRY", registry)
    dispatch.register("watching", dispatch.Entry(__name__, ("cpu",)), first=True)
    monkeypatch.setattr(dispatch, "_load", lambda module: backend if module == __name__ else dispatch_load(module))
    for _ in range(2):
        tw.attention(even, k, v)
        assert close(tw.attention(odd, k, v), F.scaled_dot_product_attention(odd, k, v))
    assert len(backend.asked) == 2 and not backend.asked[0].needs_lse
    tw.attention(even, k, v, return_lse=True)
    assert backend.asked[-1].needs_lse


def test_deterministic_switch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(1, 1, 8, 32)
    monkeypatch.setitem(dispatch.REGISTRY, "watching", dispatch.Entry(__name__, ("cpu",)))
    monkeypatch.setattr(dispatch, "_load", lambda module: backend if module == __name__ else dispatch_load(module))
    seen = []
    for wanted in (False, True, False):
        torch.use_deterministic_algorithms(wanted)
        try:
            tw.attention(q, k, v, backend="watching")
        finally:
            torch.use_deterministic_algorithms(False)
        seen.append(backend.asked[-1].deterministic)
    assert seen == [False, True, False]


def test_nothing_is_kept_of_the_tensors() -> None:
    q, k, v = drawn(1, 1, 40, 32)
    tw.attention(q, k, v)
    tw.attention(q, k, v)
    gone = weakref.ref(q)
    del q
    gc.collect()
    assert gone() is None


def test_a_torch_without_guards_looks_calls_up_by_their_facts(monkeypatch: pytest.MonkeyPatch, misses: list[str]) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    q, k, v = drawn(1, 1, 40, 32)
    for _ in range(2):
        assert close(tw.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert misses == ["miss", "miss"]


def test_compiled_calls_see_the_operator(qkv: Tensors) -> None:
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(lambda q, k, v: tw.attention(q, k, v), backend=backend, fullgraph=True)
    assert close(compiled(*qkv), tw.attention(*qkv)) and "tilewise.attention" in graphs[0]


def test_every_call_with_dropout_draws_one_seed() -> None:
    """The first of a shape too: else checkpointing, which calls again from the same state, would drop other weights."""
    q, k, v = (torch.randn(1, 2, 41, 8) for _ in range(3))
    found = []
    for _ in range(3):
        torch.manual_seed(7)
        out = tw.attention(q, k, v, dropout_p=0.5)
        found.append((out, torch.rand(())))
    for out, after in found[1:]:
        assert torch.equal(out, found[0][0]) and after == found[0][1]
