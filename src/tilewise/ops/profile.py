"""A named range for torch.profiler around calls that run no operator of ours; without a profiler it costs a look at a flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.autograd import profiler

Result = TypeVar("Result")
FORWARD, BACKWARD = "tilewise::attention", "tilewise::attention_backward"
"""The names of the operators, which torch shows by itself."""


def profiled(name: str, call: Callable[..., Result], *args: object) -> Result:
    """`call(*args)`, as a range of that name if a profiler runs."""
    if not profiler._is_profiler_enabled:
        return call(*args)
    with profiler.record_function(name):
        return call(*args)
