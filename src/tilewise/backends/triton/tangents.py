"""What the kernels of derivatives take beside the problem, and the tiles they hold. Imports neither torch nor triton."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.gpu.structs import View


class TangentArgs(NamedTuple):
    """The tangents of the inputs, None for those that stay, and those of the results."""

    q: View | None
    k: View | None
    v: View | None
    bias: View | None
    sinks_ptr: Any
    out: View | None
    lse_ptr: Any


class SecondArgs(NamedTuple):
    """What the double backward reads and writes."""

    dout: View
    delta_ptr: Any  # rowsum(dO ∘ O) - dLSE
    delta_t_ptr: Any  # rowsum(dO ∘ O_t)
    dq: View | None
    dk: View | None
    dv: View | None


class QueryTiles(NamedTuple):
    q_tile: Any
    q_t_tile: Any
    dout_tile: Any


class KeyTiles(NamedTuple):
    k_tile: Any
    v_tile: Any
    k_t_tile: Any
    v_t_tile: Any
