"""The attention weights `output_attentions=True` asks for: N × N numbers for each head, so they are formed only then.

The output comes from tilewise as always. This second pass takes a tile of rows at a time, applies tilewise's own mask and gives
what `eager` returns: the weights after dropout, in the dtype of the queries, with gradients.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilewise.integrations.transformers.promise import filled
from tilewise.masks import MaskShape
from tilewise.numerics.philox import keep_tile

ROWS = 256
"""Queries of a tile."""


def asked_for(features: dict[str, Any]) -> bool:
    """Whether the caller of the model wants weights. Not every layer passes that on; the model's collector, which a compiled
    graph cannot ask, knows too."""
    wanted = features.get("output_attentions")
    if wanted is not None or torch.compiler.is_compiling():
        return bool(wanted)
    collector = _collector()
    collected = collector.get() if collector is not None else None
    if not collected:
        return False
    return any(name.endswith("attentions") for name in collected)


@cache
def _collector() -> Any:
    """Where transformers gathers what layers return during a forward; None where it has none."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector


def attention_weights(query: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor:
    """(B, H, Sq, Sk), by the options `tilewise.attention` was called with; a row that sees nothing is 0."""
    key = key.repeat_interleave(query.shape[1] // max(key.shape[1], 1), dim=1)
    queries = query.shape[2]
    tiles = [_tile(query, key, options, (lo, min(lo + ROWS, queries))) for lo in range(0, queries, ROWS)]
    return torch.cat(tiles, dim=2) if tiles else query.new_zeros(*query.shape[:3], key.shape[2])


def _tile(query: Tensor, key: Tensor, options: dict[str, Any], rows: tuple[int, int]) -> Tensor:
    lo, hi = rows
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = 1.0 / math.sqrt(dim) if options["scale"] is None else options["scale"]
    scores = (query[:, :, lo:hi].to(wide) @ key.to(wide).mT) * scale  # [B, H, M, N]
    if options["softcap"]:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if options["bias"] is not None:
        bias = options["bias"]
        scores = scores + (bias if bias.shape[-2] == 1 else bias[..., lo:hi, :])
    seen = None
    if options["mask"] is not None:
        seen = filled(options["mask"], MaskShape(batch, heads, queries, keys), rows, query.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    blind = (scores == -math.inf).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    if options["sinks"] is not None:
        sink = options["sinks"].to(wide).reshape(1, -1, 1, 1).expand(batch, heads, hi - lo, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = weights.masked_fill(blind, 0.0)
    p = options["dropout_p"]
    if p:
        kept = keep_tile(options["seed"], p, range(batch), range(heads), range(lo, hi), range(keys), device=query.device)
        weights = torch.where(kept, weights / (1 - p), 0.0) if p < 1 else torch.zeros_like(weights)
    return weights.to(query.dtype)
