"""`rotary`: positions turned into angles, for `attention_cached` to apply to queries and new keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.api.lengths import readable
from tilewise.api.parse import check_dense, check_device
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError
from tilewise.masks.arrays import INTEGERS
from tilewise.ops.tensors import dtype_name


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Cosines and sines by position; made by `rotary`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    positions: Tensor | None

    def check(self, x: Tensor, positions: Tensor | None) -> None:
        """Raise on tokens (T, H, D) that it cannot turn, and on positions (T,) that are beyond it."""
        half = self.cos.shape[1]
        if 2 * half > x.shape[-1]:
            raise LayoutError(f"rotary: turns {2 * half} features, but heads have {x.shape[-1]}")
        check_device("rotary", self.cos, x.device)
        if positions is not None and readable(positions) and positions.numel() and int(positions.max()) >= self.cos.shape[0]:
            raise ArgumentError(
                f"rotary: position {int(positions.max())}, but cos and sin have {self.cos.shape[0]} rows"
            )

    def apply(self, x: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """x (T, H, D) turned in float32 by its positions (T,), rounded to `dtype`.

        A position before the first counts as the first.
        """
        self.check(x, positions)
        half = self.cos.shape[1]
        at = positions.clamp(0, self.cos.shape[0] - 1)
        work = torch.promote_types(torch.float32, x.dtype)
        cos, sin = (table[at].to(work)[:, None, :] for table in (self.cos, self.sin))
        turned, rest = x[..., : 2 * half].to(work), x[..., 2 * half :]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turned[..., :half], turned[..., half:]
            pairs = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([pairs.to(dtype), rest.to(dtype)], dim=-1)


def rotary(cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None) -> RotaryTable:
    """Rotary position embedding for `attention_cached`: it turns queries and new keys by their positions.

    cos: (positions, r / 2): the first r features of a head are turned, r at most D.
    sin: the same.
    interleaved: pairs are neighbouring features; else feature i of the first half and feature i of the second.
    positions: those of q's rows, (T,) or (B, Sq) like q; None counts them in the sequence.

    >>> angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(0, 128, 2) / 128)
    >>> out = tw.attention_cached(q, cache, new=(k, v), rotary=tw.rotary(angles.cos(), angles.sin()))
    """
    for name, x in (("cos", cos), ("sin", sin)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise ArgumentTypeError(f"{name}: got {_kind(x)}, need a floating-point tensor (positions, r / 2)")
        check_dense(name, x)
        if x.ndim != 2 or x.shape != cos.shape or x.shape[0] < 1 or x.device != cos.device:
            raise LayoutError(f"{name}: shape {tuple(x.shape)} on {x.device}, need (positions, r / 2), cos and sin alike")
    if positions is not None and (not isinstance(positions, Tensor) or dtype_name(positions) not in INTEGERS):
        raise ArgumentTypeError(f"positions: got {_kind(positions)}, need an integer tensor")
    return RotaryTable(cos, sin, bool(interleaved), positions)


def _kind(x: Any) -> Any:
    return x.dtype if isinstance(x, Tensor) else type(x).__name__
