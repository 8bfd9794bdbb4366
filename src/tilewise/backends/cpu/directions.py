"""Directions as the kernels of derivatives take them: addresses and strides of what moves."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Direction, Inputs, Tangents, sink_gradient_tangent, sink_weight
from tilewise.backends.cpu.spec import MOVING

NO_STRIDES = (0, 0, 0, 0)


def broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of a tensor that is repeated along sides of one element."""
    if x is None:
        return NO_STRIDES
    return tuple(0 if side == 1 else step for side, step in zip(x.shape, x.stride(), strict=True))


def moving_arguments(tangents: Tangents, out_t: Tensor | None, lse_t: Tensor) -> list[tuple[str, int]]:
    """The arguments of what moves; what is not given has no address."""
    args = [("lse_t", lse_t.data_ptr())]
    given: dict[str, Tensor | None] = {**dict(zip(MOVING, tangents, strict=False)), "ot": out_t}
    for name, x in given.items():
        if x is not None:
            strides = broadcast_strides(x) if name == "bias_t" else x.stride()
            args += [(name, x.data_ptr()), *((f"{name}_{axis}", step) for axis, step in zip("bhsd", strides, strict=True))]
    return args


class Moving(NamedTuple):
    """The direction of a double backward as its kernel reads it."""

    tangents: Tangents
    out_t: Tensor | None
    lse_t: Tensor
    """Without out_t: the sink's part of it, and the whole when the kernel is done."""
    delta_t: Tensor
    """Written by the kernel, without out_t."""


def readable_direction(direction: Direction, blind: Tensor | None, bias: str, inputs: Inputs, lse: Tensor) -> Moving:
    """Queries that see no key stay, whatever their tangent holds, and a bias of that dtype ("": none) that stays moves by a zero
    that is read for every score."""
    tangents, out_t, lse_t = direction
    if blind is not None and tangents.q is not None:
        tangents = tangents._replace(q=tangents.q.masked_fill(blind.unsqueeze(-1), 0.0))
    if bias and tangents.bias is None:
        zero = torch.zeros((1, 1, 1, 1), dtype=getattr(torch, bias), device="cpu")
        tangents = tangents._replace(bias=zero)
    if out_t is None or lse_t is None:
        out_t, lse_t = None, torch.zeros_like(lse)
        if inputs.sinks is not None and tangents.sinks is not None:
            lse_t += sink_weight(inputs.sinks, lse) * tangents.sinks.to(lse.dtype)[:, None]
    return Moving(tangents, out_t, lse_t.to(lse.dtype).contiguous(), torch.empty_like(lse))


def moving_sink_gradient(sinks: Tensor, given: BackwardInputs, delta: Tensor, moving: Moving) -> Tensor:
    """The double backward's gradient of the sinks."""
    lse, delta_t = given.lse, moving.delta_t
    if moving.out_t is not None:
        delta_t = (given.dout.to(lse.dtype) * moving.out_t.to(lse.dtype)).sum(dim=-1)
    return sink_gradient_tangent(sinks, moving.tangents.sinks, (lse, moving.lse_t, delta, delta_t))
