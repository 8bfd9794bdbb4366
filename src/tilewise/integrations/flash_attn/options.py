"""What flash_attn's options mean in tilewise's own words."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import ArgumentError
from tilewise.masks import UNBOUNDED, Mask, full
from tilewise.masks.algebra import Band, OffsetBand


class Window(NamedTuple):
    """How many keys before and after its own a query sees; None is no limit, below 0 ends short of its own."""

    left: int | None
    right: int | None

    @property
    def limited(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def sees_ahead(self) -> bool:
        return self.right is None or self.right > 0

    def mask(self, offset: Tensor | None = None) -> Mask:
        """offset: (B,), the key that query 0 stands at; None puts the last query at the last key."""
        if not self.limited:
            return full()
        lo = -UNBOUNDED if self.left is None else -min(self.left, UNBOUNDED)
        hi = UNBOUNDED if self.right is None else min(self.right, UNBOUNDED)
        return Band(lo, hi, "b") if offset is None else OffsetBand(lo, hi, offset)


def sides(window_size: Any, causal: bool, negative: bool = False) -> Window:
    """The window of a call, causality included.

    Its sides are integers, from a pair of whatever counts as one: also a tensor or an array. None is no limit, and so is −1,
    unless a side may be `negative`, as in FlashAttention-4.
    """
    need = "None meaning no limit" if negative else "−1 meaning no limit"
    try:
        left, right = (None if side is None else index(plain(side)) for side in window_size)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"window_size: got {window_size!r}, need a pair of integers (left, right), {need}") from error
    if not negative:
        if min(side for side in (left, right, 0) if side is not None) < -1:
            raise ArgumentError(f"window_size: got {window_size!r}, need integers of at least −1 (which means no limit)")
        left, right = (None if side == -1 else side for side in (left, right))
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:  # a window that holds nothing is none, as there
        left, right = None, 0 if causal else None
    return Window(left, right)


def plain(number: Any) -> Any:
    """A Python number for a scalar of numpy or torch; all else as it is, for the checks to name."""
    return number.item() if isinstance(number, np.generic | Tensor) else number


def cumulative(lengths: Tensor) -> Tensor:
    """int32 (B + 1,), where sequences of these lengths begin."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def steps(x: Tensor) -> Tensor:
    """int32 (B + 1,), where the rows of a padded batch (B, S, …) begin."""
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def shape_of(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
