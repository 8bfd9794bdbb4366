"""The words that arguments may be, for type checkers and for what completes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

BackendName = Literal["auto", "hopper", "aten", "cpu", "triton", "tiled", "reference"]
"""`auto`, or a backend of `dispatch.REGISTRY`; one that you registered yourself is `cast` to this."""
Layout = Literal["bhsd", "bshd"]
"""(batch, heads, sequence, dim) or (batch, sequence, heads, dim)."""
Precision = Literal["default", "tf32", "compensated", "double"]
Tile = tuple[int, int] | Mapping[str, tuple[int, int]]
"""(block_q, block_k) of the forward, or such a pair for each pass that is named."""
