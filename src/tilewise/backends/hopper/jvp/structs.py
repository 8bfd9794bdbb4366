"""The arguments of the JVP's kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.hopper.structs import Divisor, Rows, Term


class JvpArguments(NamedTuple):
    """Beside the tensors' descriptors; None is no argument at all. Names are those of the forward's `Arguments`."""

    lse_ptr: Any  # (B, H, M) fp32, contiguous
    lse_t_ptr: Any
    cu_q: Any
    cu_k: Any
    order: Any
    out: Rows | None  # of a packed batch, as the next
    out_t: Rows | None
    terms: tuple[Term, ...]
    heads: Divisor
    group: Divisor
    blocks: Divisor
    batch: int
    len_q: int
    len_k: int
    last_q: int
    last_block: int
    total: int
    programs: int
    scale_log2: float
    scale: float  # of the derivative of scores
    bias_flag: Any = None  # asked for by functions of the forward
    bias_again: int | None = None
    owners: Any = None
