"""What flash_attn's options mean in tilewise's own words."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np
from torch import Tensor

from tilewise.errors import ArgumentError
from tilewise.masks import UNBOUNDED, Mask, full, window


def window_mask(window_size: Any, causal: bool) -> Mask:
    """The sides of a window are integers, from a pair of whatever counts as one: also a tensor or an array."""
    try:
        sides = left, right = [index(plain(side)) for side in window_size]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"window_size: got {window_size!r}, need a pair of integers (left, right), −1 meaning no limit"
        ) from error
    if min(sides) < -1:
        raise ArgumentError(f"window_size: got {window_size!r}, need integers of at least −1 (which means no limit)")
    left, right = (UNBOUNDED if side == -1 else min(side, UNBOUNDED) for side in sides)
    right = 0 if causal else right
    return full() if left == right == UNBOUNDED else window(left, right)


def plain(number: Any) -> Any:
    """A Python number for a scalar of numpy or torch; all else as it is, for the checks to name."""
    return number.item() if isinstance(number, np.generic | Tensor) else number
