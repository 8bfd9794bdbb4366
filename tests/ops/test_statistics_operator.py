"""Calls with statistics through their operators: torch.compile, torch.export, meta tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.library import opcheck

import tilewise as tw
from tilewise.backends.base import Inputs
from tilewise.errors import DerivativeError
from tilewise.masks import Mask
from tilewise.ops import library, library_statistics
from tilewise.problem import Problem

STATS = ("max_logit", "entropy", "key_mass", tw.top(3))


def drawn(*shape: int, seed: int = 0, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def flat(result: Any) -> list[torch.Tensor]:
    out, lse, stats = result
    return [out, lse, stats.max_logit, stats.entropy, stats.key_mass, *stats.top]


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None = None) -> list[torch.Tensor]:
    return flat(tw.attention(q, k, v, mask=mask, return_lse=True, stats=STATS))


def loss(found: list[torch.Tensor]) -> torch.Tensor:
    return found[0].sum() + found[1].sum() + found[3].pow(2).sum()


def test_one_graph_holds_statistics_and_the_entropys_gradient() -> None:
    """Values, gradients, and no more than two graphs for several lengths."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for n in (8, 12, 20):
        leaves = [drawn(2, 2, n, 4, seed=i, grad=True) for i in range(3)]
        found, expected = (function(*leaves, mask=tw.causal()) for function in (compiled, call))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert [x.requires_grad for x in found] == [x.requires_grad for x in expected]
        gradients = (torch.autograd.grad(loss(x), leaves) for x in (found, expected))
        for ours, theirs in zip(*gradients, strict=True):  # of a gradient with other strides a row's sum has another order
            torch.testing.assert_close(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_an_exported_program_has_statistics() -> None:
    class Watched(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
            return call(q, k, v)

    leaves = tuple(drawn(1, 2, 8, 4, seed=i) for i in range(3))
    found = torch.export.export(Watched(), leaves).module()(*leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, call(*leaves), strict=True))


def test_meta_tensors_have_the_shapes_of_statistics() -> None:
    leaves = [drawn(2, 4, 8, 4, seed=i) for i in range(3)]
    found, expected = call(*(x.to("meta") for x in leaves)), call(*leaves)  # type: ignore[misc]
    assert [(x.shape, x.dtype, x.stride()) for x in found] == [(x.shape, x.dtype, x.stride()) for x in expected]


@pytest.mark.parametrize("stats", [STATS, ("key_mass",), ("entropy",), (tw.top(2),)], ids=str)
def test_the_operator_keeps_torchs_rules(stats: tuple[str, ...]) -> None:
    inputs = Inputs(*(drawn(1, 2, 6, 4, seed=i, grad=True) for i in range(3)))
    problem = Problem.of(batch=1, heads=2, seqlen=6, head_dim=4, dtype="float32", mask=tw.causal(), device="cpu")
    args = (*library.pack(problem, inputs, "tiled"), ",".join(stats))
    names = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(torch.ops.tilewise.attention_statistics.default, args, test_utils=names)
    out, lse, found = library_statistics.attend(watching(problem, stats), inputs, "tiled")
    assert [name for name, x in found._asdict().items() if x is not None and name != "key_lse"]
    assert out.shape == inputs.q.shape and lse.shape == inputs.q.shape[:3]


def watching(problem: Problem, stats: tuple[str, ...]) -> Problem:
    return replace(problem, stats=stats)


def test_no_second_derivative() -> None:
    torch._dynamo.reset()
    inputs = Inputs(*(drawn(1, 1, 6, 4, seed=i, grad=True) for i in range(3)))
    problem = Problem.of(batch=1, heads=1, seqlen=6, head_dim=4, dtype="float32", device="cpu")
    _, _, found = library_statistics.attend(watching(problem, ("entropy",)), inputs, "tiled")
    assert found.entropy is not None
    (dq,) = torch.autograd.grad(found.entropy.sum(), inputs.q, create_graph=True)
    with pytest.raises(DerivativeError, match="first derivatives only"):
        dq.sum().backward()
