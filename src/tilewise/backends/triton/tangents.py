"""What the kernels of derivatives take beside the problem, and the tiles they hold. Imports neither torch nor triton."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.gpu.structs import View


class TangentArgs(NamedTuple):
    """The tangents of the inputs, None for those that stay, and those of the results; from `dout` on, what the double backward
    reads and writes.

    One struct, in which something is None always: where nothing is, Triton 3.6 does not learn of the constants inside it.
    """

    q: View | None
    k: View | None
    v: View | None
    bias: View | None
    sinks_ptr: Any
    out: View | None
    lse_ptr: Any
    dout: View | None = None  # this and the rest None in a JVP
    delta_ptr: Any = None  # rowsum(dO ∘ O) - dLSE
    delta_t_ptr: Any = None  # rowsum(dO ∘ O_t)
    dq: View | None = None
    dk: View | None = None
    dv: View | None = None
    dbias: View | None = None  # in a kernel of its own
    bias_shape: tuple[int, ...] | None = None


class StatisticsArgs(NamedTuple):
    """Where statistics go, and what the gradient of the entropy reads and writes; None for what a kernel has nothing to do with,
    and something is None always, as in `TangentArgs`. Rows are (B, H, M) fp32, contiguous."""

    max_logit_ptr: Any = None
    entropy_ptr: Any = None
    key_lse_ptr: Any = None  # beside the entropy
    mass_ptr: Any = None  # (B, H, N) fp32
    weights_ptr: Any = None  # (B, H, M, k) fp32, and as many indices of int64
    indices_ptr: Any = None
    dentropy_ptr: Any = None
    mean_ptr: Any = None
    dq: View | None = None
    dk: View | None = None
    dbias: View | None = None
    bias_shape: tuple[int, ...] | None = None


class QueryTiles(NamedTuple):
    q_tile: Any
    q_t_tile: Any
    dout_tile: Any


class KeyTiles(NamedTuple):
    k_tile: Any
    v_tile: Any
    k_t_tile: Any
    v_t_tile: Any
