"""Rotary position embedding: pairs of features turn by an angle proportional to the position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewise.errors import ArgumentError


class Rotary(nn.Module):
    """Feature i of the first half turns with feature i of the second half by position · theta^(−2i / dim)."""

    frequencies: Tensor

    def __init__(self, dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ArgumentError(f"dim: got {dim}, rotary embedding needs an even number of features")
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        self.register_buffer("frequencies", theta**-exponents, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, S, H, D) turned by `positions` (S,) or (B, S)."""
        # in float64, because an angle of a long sequence has no digits to spare; positions are few beside the features
        angles = positions.to(torch.float64)[..., None] * self.frequencies.double()
        cos, sin = (f(angles).to(x.dtype).unsqueeze(-2) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
