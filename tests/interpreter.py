"""A mark for tests that run kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest


def _reason() -> str:
    """Why nothing can be interpreted here."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton"
    from tilewise.backends.triton.backend import interpreter_reason

    return interpreter_reason() or ""


needs_interpreter = pytest.mark.skipif(bool(_reason()), reason=_reason())
