"""What CUDA graphs read and nobody else keeps.

A captured call holds addresses, not tensors. What belongs to a caller is the caller's to keep; what we made beside it, and would
drop one day to make room, is kept here for good: integers, a few KiB for each graph.
"""

from __future__ import annotations

from typing import TypeVar

import torch

T = TypeVar("T")
_kept: dict[int, object] = {}


def is_capturing() -> bool:
    """Is the current stream of the current GPU being captured?"""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def keep_if_captured(x: T) -> T:
    """x, or what holds it, which a graph reads from now on if one is being captured. It was made before: memory of the graph's
    own would keep all of that from being freed."""
    if is_capturing():
        _kept[id(x)] = x
    return x
