"""Biases that are computed in the tile and never stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewise.errors import ArgumentTypeError, LayoutError


@dataclass(frozen=True, eq=False)
class Alibi:
    """score -= slope * |q + Sk - Sq - k|: one slope for each query head, or (batch, head)."""

    slopes: Any


def alibi(slopes: Any) -> Alibi:
    """Linear biases by distance (ALiBi): slope · |q − k| is taken from a score, positions aligned at the end; never stored.

    slopes: a floating-point tensor (heads,) or (batch, heads) without a gradient; heads are query heads.

    >>> slopes = 2.0 ** -torch.arange(1, 9)
    >>> out = tw.attention(q, k, v, mask=tw.causal(), bias=tw.alibi(slopes))
    """
    if not hasattr(slopes, "requires_grad") or not slopes.is_floating_point():
        got = getattr(slopes, "dtype", type(slopes).__name__)
        raise ArgumentTypeError(f"alibi: slopes is {got}, need a floating-point tensor; convert with torch.tensor(...)")
    if slopes.requires_grad:
        raise ArgumentTypeError(
            "alibi: slopes requires a gradient, which ALiBi does not have; pass slopes.detach(), or a tensor bias"
        )
    if slopes.ndim not in (1, 2):
        raise LayoutError(f"alibi: slopes has shape {tuple(slopes.shape)}, need (heads,) or (batch, heads)")
    return Alibi(slopes)
