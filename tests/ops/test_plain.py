"""Calls of plain tensors: the layout of the user is undone inside the autograd function, and nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import dispatch
from tilewise.api import call_cache
from tilewise.backends.base import Inputs, Needs, empty_lse, empty_out, empty_packed, from_rank4, to_rank4
from tilewise.errors import KernelError
from tilewise.ops.plain import PlainCall, in_layout, needs_of, rank4
from tilewise.problem import Problem

CU = torch.tensor([0, 5, 12], dtype=torch.int32)
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[..., Tensor]]] = {
    "bhsd": ((2, 4, 6, 8), lambda q, k, v: tw.attention(q, k, v, mask=tw.causal())),
    "bshd": ((2, 6, 4, 8), lambda q, k, v: tw.attention(q, k, v, mask=tw.causal(), layout="bshd")),
    "packed": ((12, 4, 8), lambda q, k, v: tw.attention_varlen(q, k, v, CU, mask=tw.causal())),
}


def drawn(layout: str, *, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(LAYOUTS[layout][0], dtype=torch.float64).requires_grad_(grad) for _ in range(3)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_may_be_written_to(layout: str) -> None:
    """An output that is a view, one of two of its function, could not be."""
    for grad in (False, True):
        inputs = drawn(layout, grad=grad)
        out = LAYOUTS[layout][1](*inputs)
        want = out.detach() * 2
        out.mul_(2)
        assert torch.equal(out, want) and out.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["out", 0, 1, 2])
def test_a_change_in_place_is_noticed(layout: str, which: str | int) -> None:
    inputs = drawn(layout)
    q, k, v = (x * 1 for x in inputs)
    out = LAYOUTS[layout][1](q, k, v)
    total = (out * 1).sum()
    (out.detach() if isinstance(which, str) else (q, k, v)[which].detach()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_kind(layout: str) -> None:
    """Some of them, of strided tensors, in a batch, and of gradients."""
    attend = LAYOUTS[layout][1]
    q, k, v = drawn(layout)
    wide = torch.cat([q, k, v], -1).detach().requires_grad_()
    first = torch.autograd.grad(attend(*wide.split(8, -1)).square().sum(), wide)[0]
    apart = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    assert torch.allclose(first, torch.cat(apart, -1), rtol=0, atol=1e-12)
    some = torch.autograd.grad(attend(q.detach(), k, v.detach()).square().sum(), k)[0]
    assert torch.allclose(some, apart[1], rtol=0, atol=1e-12)
    out = attend(q, k, v)
    rows = torch.randn(3, *out.shape, dtype=out.dtype)
    batch = torch.autograd.grad(out, (q, k, v), rows, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        one = torch.autograd.grad(out, (q, k, v), rows[i], retain_graph=True)
        assert all(torch.allclose(a[i], b, rtol=0, atol=1e-12) for a, b in zip(batch, one, strict=True))
    assert torch.autograd.gradgradcheck(attend, (q, k, v), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_back(layout: str) -> None:
    whole = drawn(layout, grad=False)[0]
    for x in (whole, torch.cat([whole, whole], -1)[..., 3:9], whole[..., :2, :]):
        inner = rank4(x, layout, False)
        assert inner.ndim == 4 and inner.shape[1] == x.shape[1 if layout == "bhsd" else -2]
        for quick in (False, True):
            assert same(rank4(x, layout, quick), inner) and same(in_layout(inner, layout, quick), x)


def same(a: Tensor, b: Tensor) -> bool:
    """The same view of the same memory."""
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def test_needs_are_those_of_the_tensors() -> None:
    chosen: Any = None
    call = PlainCall(Problem.of(heads=1, seqlen=8, head_dim=8), "auto", chosen, "bhsd", (0, 1, 2, 5), (0, 1, 2, -1, 3))
    assert needs_of(call, (False, True, False, True, True, False)) == Needs(True, False, True, False, True)
    three = call._replace(places=(0, 1, 2), numbers=(0, 1, 2, -1, -1))
    assert needs_of(three, (False, True, False, True)) == Needs(True, False, True)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_packed_call_passes_to_the_next_backend(pass_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's answer, and the question to the next one, are about tensors of rank 4."""
    inputs = drawn("packed")
    attend = LAYOUTS["packed"][1]
    want = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    asked: list[int] = []

    def fail(problem: Problem, inputs: Inputs, *given: Any) -> Any:
        asked.append(inputs.q.ndim)
        raise KernelError("no compiler")

    problem = Problem.of(heads=4, seqlen=12, head_dim=8, dtype="float64")
    first = dispatch.select(problem, Inputs(*(to_rank4(x.detach()) for x in inputs)), "auto").backend
    monkeypatch.setattr(first, pass_, fail)
    monkeypatch.setattr(call_cache, "_calls", {})
    with pytest.warns(RuntimeWarning):
        got = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    assert asked and set(asked) == {4}
    assert all(torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("head_dim_v", [8, 5])
def test_packed_memory_is_laid_out_as_that_of_rank_4(head_dim_v: int) -> None:
    whole = torch.randn(12, 4, 8, dtype=torch.bfloat16)
    for q in (whole, whole.transpose(0, 1).contiguous().transpose(0, 1), whole[::2], whole[:, :1], whole[:1], whole[:, ::2]):
        out, lse = empty_packed(q, head_dim_v)
        inner = to_rank4(q)
        want, rows = from_rank4(empty_out(inner, head_dim_v)), empty_lse(inner)
        assert (out.shape, out.stride(), out.dtype) == (want.shape, want.stride(), want.dtype)
        assert (lse.shape, lse.stride(), lse.dtype) == (rows.shape, rows.stride(), rows.dtype)


def test_an_unasked_log_sum_exp_is_no_result() -> None:
    """Each result of an autograd function costs time."""

    def results(out: Tensor) -> int:
        counted: list[int] = []
        out.grad_fn.register_prehook(lambda grads: counted.append(len(grads)))  # type: ignore[union-attr]
        out.sum().backward()
        return counted[0]

    for layout, (_, attend) in LAYOUTS.items():
        assert results(attend(*drawn(layout))) == 1, layout
    q, k, v = drawn("bhsd")
    out, lse = tw.attention(q, k, v, return_lse=True)
    assert out.grad_fn is lse.grad_fn and results(out) == 2
