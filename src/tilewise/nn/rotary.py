"""Rotary position embedding: pairs of features turn by an angle proportional to the position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewise.errors import ArgumentError


class Rotary(nn.Module):
    """Feature i of the first half turns with feature i of the second half by position · theta^(−2i / dim).

    dim: features of a head, an even number.
    theta: the base of the angles.

    It has no parameters and no buffers: the frequencies follow from `dim` and `theta`, so no cast of a model rounds them
    and no way to make one (on the meta device, from a state dict) leaves them out.

    >>> q = tw.nn.Rotary(64)(q, torch.arange(q.shape[1]))      # q (B, S, H, 64)
    """

    def __init__(self, dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ArgumentError(f"dim: got {dim}, rotary embedding needs an even number of features")
        self.dim, self.theta = dim, float(theta)

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """The angle of one position, for each pair of features: (dim / 2,) in float64."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim
        return torch.pow(self.theta, -exponents)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn x by its positions.

        x: (B, S, H, D).
        positions: (S,) or (B, S).

        Returns the shape of x.
        """
        # in float64, because an angle of a long sequence has no digits to spare; positions are few beside the features
        angles = positions.to(torch.float64)[..., None] * self.frequencies(positions.device)
        cos, sin = (f(angles).to(x.dtype).unsqueeze(-2) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, theta={self.theta}"
