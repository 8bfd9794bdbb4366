"""Caches in Triton's interpreter. Each share is a process: see `interpreted.py`."""

from __future__ import annotations

import pytest

from tests.backends.test_triton_interpreter import interpret
from tests.interpreter import needs_interpreter

SHARES = 2


@needs_interpreter
@pytest.mark.parametrize("share", range(SHARES))
def test_caches_in_the_interpreter(share: int) -> None:
    interpret("tests.cache.interpreted", str(share), str(SHARES))
