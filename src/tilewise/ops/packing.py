"""Packed batches: the cumulative lengths are data, so they are checked where they are read, also under torch.compile."""

from __future__ import annotations

import os
from itertools import pairwise

from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.errors import ArgumentError


def check_packing(inputs: Inputs) -> None:
    """Raise on cumulative lengths that do not fit their tokens.

    On a GPU that would wait for the device, so it happens only if TILEWISE_CHECK=1 asks for it; kernels clamp.
    """
    for name, cu, x in (("cu_seqlens_q", inputs.cu_q, inputs.q), ("cu_seqlens_k", inputs.cu_k, inputs.k)):
        if cu is not None and (cu.device.type == "cpu" or os.environ.get("TILEWISE_CHECK") == "1"):
            _check(name, cu, x.shape[2])


def _check(name: str, cu: Tensor, tokens: int) -> None:
    values = cu.tolist()
    if values[0] != 0:
        raise ArgumentError(f"{name}: starts with {values[0]}, need 0")
    for i, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ArgumentError(
                f"{name}: falls from {start} to {end} at position {i + 1}; cumulative lengths never fall"
            )
    if values[-1] != tokens:
        raise ArgumentError(f"{name}: ends with {values[-1]}, but there are {tokens} tokens")
