"""Directions as the kernels of derivatives take them: addresses and strides of what moves."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Direction, Tangents, rounded
from tilewise.backends.cpu.spec import MOVING
from tilewise.numerics.merge import finite

NO_STRIDES = (0, 0, 0, 0)


def broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of a tensor that is repeated along sides of one element."""
    if x is None:
        return NO_STRIDES
    return tuple(0 if side == 1 else step for side, step in zip(x.shape, x.stride(), strict=True))


def moving_arguments(tangents: Tangents, out_t: Tensor, lse_t: Tensor) -> list[tuple[str, int]]:
    """The arguments of what moves; a tangent that is not given has no address."""
    args = [("lse_t", lse_t.data_ptr())]
    given: dict[str, Tensor | None] = {**dict(zip(MOVING, tangents, strict=False)), "ot": out_t}
    for name, x in given.items():
        if x is not None:
            strides = broadcast_strides(x) if name == "bias_t" else x.stride()
            args += [(name, x.data_ptr()), *((f"{name}_{axis}", step) for axis, step in zip("bhsd", strides, strict=True))]
    return args


def readable_direction(direction: Direction, blind: Tensor | None, bias: str, real: torch.dtype) -> Direction:
    """The direction of a double backward as its kernel reads it: queries that see no key stay, whatever their tangent holds, and
    a bias of that dtype ("": none) that stays moves by a zero that is read for every score."""
    tangents, out_t, lse_t = direction
    if blind is not None and tangents.q is not None:
        tangents = tangents._replace(q=tangents.q.masked_fill(blind.unsqueeze(-1), 0.0))
    if bias and tangents.bias is None:
        zero = torch.zeros((1, 1, 1, 1), dtype=getattr(torch, bias), device="cpu")
        tangents = tangents._replace(bias=zero)
    return Direction(tangents, out_t, lse_t.to(real).contiguous())


def moving_sink_gradient(sinks: Tensor, given: BackwardInputs, delta: Tensor, direction: Direction) -> Tensor:
    """-Σ P_z ((z_t - L_t) delta + delta_t), summed over the rows of each head; 0 for an infinite sink."""
    tangents, out_t, lse_t = direction
    lse = given.lse
    sink = sinks.to(lse.dtype)[:, None]
    weight = torch.where(sink.isinf(), 0.0, torch.exp(sink - finite(lse)))  # [B, Hq, M]
    delta_t = (given.dout.to(lse.dtype) * out_t.to(lse.dtype)).sum(dim=-1)
    moved = -lse_t if tangents.sinks is None else tangents.sinks.to(lse.dtype)[:, None] - lse_t
    return rounded(-(weight * (moved * delta + delta_t)).sum(dim=(0, 2)), sinks.dtype)
