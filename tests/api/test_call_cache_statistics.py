"""The call cache, for calls that ask for statistics."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.api.test_call_cache import close, drawn
from tilewise import dispatch
from tilewise.api import call_cache
from tilewise.backends.base import Inputs
from tilewise.errors import ArgumentTypeError, KernelError
from tilewise.problem import Problem


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_calls_with_statistics_are_parsed_once(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    parse = call_cache.parse_call
    monkeypatch.setattr(call_cache, "parse_call", lambda *args: parsed.append(args) or parse(*args))
    monkeypatch.setattr(call_cache, "_calls", {})
    q, k, v = drawn(1, 24, 24, 32)
    options: Any = {"mask": tw.causal(), "layout": layout}

    def attend(*names: str, **more: Any) -> Any:
        return tw.attention(q, k, v, stats=names, **{**options, **more})

    first = attend("max_logit", "entropy")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        again = attend("max_logit", "entropy")
    finally:
        torch.set_num_threads(threads)
    assert len(parsed) == 1
    assert torch.equal(first[0], again[0]) and all(map(torch.equal, first[1][:2], again[1][:2]))
    assert attend("max_logit")[1].entropy is None and len(parsed) == 2
    with_lse = attend("max_logit", "entropy", return_lse=True)
    assert len(with_lse) == 3 and torch.equal(with_lse[2].entropy, first[1].entropy)
    attend("max_logit", "entropy", scale=0.5)
    attend("max_logit", "entropy", backend="tiled")
    assert len(parsed) == 5
    q = q.clone().requires_grad_()
    attend("entropy")[1].entropy.sum().backward()
    assert len(parsed) == 6 and q.grad is not None and q.grad.abs().sum() > 0
    with pytest.raises(ArgumentTypeError, match="stats"):
        tw.attention(q, k, v, stats="entropy")  # type: ignore[call-overload]


def test_statistics_are_asked_once_of_a_backend_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(1, 3, 20, 16)
    want = tw.attention(q, k, v, stats=("entropy",), backend="tiled")[1].entropy
    asked: list[Problem] = []

    def fail(problem: Problem, inputs: Inputs) -> Any:
        asked.append(problem)
        raise KernelError("no compiler")

    first = dispatch.select(tw.Problem.of(heads=3, seqlen=20, head_dim=16, stats=("entropy",)), Inputs(q, k, v), "auto").backend
    monkeypatch.setattr(first, "statistics", fail)
    monkeypatch.setattr(call_cache, "_calls", {})
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that another backend serves it
            assert close(tw.attention(q, k, v, stats=("entropy",))[1].entropy, want)
    assert len(asked) == 1
