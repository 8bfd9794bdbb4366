"""Masks that come as tile lists, for the compile check."""

from __future__ import annotations

from typing import Any

from tilewise import masks

LENGTH = 3072


def ids(sequences: int) -> Any:
    import torch

    return torch.arange(LENGTH).div(1000, rounding_mode="floor").int().expand(sequences, LENGTH)


def table(block: int, heads: int = 1) -> Any:
    import torch

    return torch.ones(1, heads, LENGTH // block, LENGTH // block, dtype=torch.bool)


LISTED: dict[str, dict[str, Any]] = {
    "documents": {"made": lambda: masks.causal() & masks.documents(ids(1))},
    "documents of each sequence": {"made": lambda: masks.causal() & masks.window(900) & masks.documents(ids(2))},
    "documents across": {"made": lambda: masks.documents(ids(1), q_ids=ids(1))},
    "blocks": {"made": lambda: masks.blocks(table(128), 128)},
    "blocks of each head": {"made": lambda: masks.causal() & masks.blocks(table(128, heads=4), 128)},
    "causal blocks or prefix": {"made": lambda: masks.causal() & masks.blocks(table(128), 128) | masks.prefix(40)},
    "dense": {"made": lambda: masks.dense(table(1))},
    "prefix or window": {"made": lambda: masks.causal() & (masks.prefix(4) | masks.window(1024))},
}
