"""Which of Triton's interpreters run the kernels: the others are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

from tilewise.backends.triton import backend


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    backend.interpreter_reason.cache_clear()
    yield
    backend.interpreter_reason.cache_clear()


@pytest.mark.parametrize(
    ("triton", "numpy", "reason"),
    [
        ("3.6.0", "2.3.5", None),
        ("3.6.0", "2.4.6", "it needs numpy < 2.4"),
        ("3.7.1", "2.4.6", None),
        ("3.8.0", "2.4.6", None),
        ("3.9.0", "2.4.6", "the interpreter of triton 3.9.0 makes masks of numbers"),
        ("3.10.0", "2.4.6", None),
    ],
)
def test_interpreters(triton: str, numpy: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    said = backend.interpreter_reason()
    assert said is None if reason is None else reason in (said or "")
