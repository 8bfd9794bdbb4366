"""A kernel that cannot be compiled or loaded: the next backend serves, with the reason, or an error of ours says it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

import tilewise as tw
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu import team
from tilewise.errors import KernelError
from tilewise.hardware.cache import CACHE_VARIABLE


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("LLVM ERROR: cannot select")


def forbidden(*_: Any, **__: Any) -> Any:
    raise OSError(13, "Permission denied")


FAILURES: dict[str, tuple[str, Callable[..., Any]]] = {"compiler": ("build", broken), "loader": ("Loaded", forbidden)}


@pytest.fixture(params=list(FAILURES))
def failing(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(compiler, *FAILURES[request.param])
    monkeypatch.setattr("tilewise.api.call_cache._calls", {})  # of calls that were served before
    return {"compiler": "cannot select", "loader": "Permission denied"}[request.param]


def drawn(head_dim: int) -> torch.Tensor:
    return torch.randn(1, 2, 20, head_dim, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options", [{}, {"return_lse": True}, {"softcap": 5.0}, {"mask": torch.ones(20, 20, dtype=torch.bool)}], ids=str
)
def test_the_next_backend_serves(failing: str, options: dict[str, Any]) -> None:
    q = drawn(41).requires_grad_()
    expected = tw.attention(q, q, q, backend="tiled", **options)
    with pytest.warns(RuntimeWarning, match=rf"cpu.*{failing}.*tiled serves"):
        actual = tw.attention(q, q, q, **options)
    out, want = (x[0] if isinstance(x, tuple) else x for x in (actual, expected))
    assert torch.equal(out, want)
    grads = torch.autograd.grad(out.sum(), q)[0]
    assert torch.equal(grads, torch.autograd.grad(want.sum(), q)[0])


def test_inference_is_served_too(failing: str) -> None:
    q = drawn(43)
    with pytest.warns(RuntimeWarning, match="tiled serves"):
        actual = tw.attention(q, q, q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a call that is remembered takes the other way at once
        again = tw.attention(q, q, q)
    assert torch.equal(actual, tw.attention(q, q, q, backend="tiled")) and torch.equal(again, actual)


def test_asked_for_by_name_it_is_an_error(failing: str) -> None:
    q = drawn(45)
    for _ in range(2):
        with pytest.raises(KernelError, match=rf"cpu.*{failing}.*tiled"):
            tw.attention(q, q, q, backend="cpu")


def test_a_backward_that_cannot_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q = drawn(47).requires_grad_()
    out = [tw.attention(q, q, q, backend=name) for name in ("auto", "cpu")]
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(compiler, "build", broken)
    expected = torch.autograd.grad(tw.attention(q, q, q, backend="tiled").sum(), q)[0]
    with pytest.warns(RuntimeWarning, match="tiled serves"):
        actual = torch.autograd.grad(out[0].sum(), q)[0]
    torch.testing.assert_close(actual, expected)
    with pytest.raises(KernelError, match="cannot select"):
        torch.autograd.grad(out[1].sum(), q)


def test_a_team_that_cannot_be_compiled_leaves_the_work_to_our_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "load_text", broken)
    team.team.cache_clear()
    try:
        assert team.team() is None
    finally:
        team.team.cache_clear()
