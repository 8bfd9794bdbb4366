"""Continuous batching: requests packed one after another, with keys and values of earlier tokens in transformers' paged cache.

transformers accepts for it only implementations whose name has "flash" in it, and makes no mask for those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api.varlen import attention_varlen
from tilewise.errors import ArgumentError
from tilewise.masks import causal, window


def attend_packed(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: Any, features: dict[str, Any]
) -> Tensor:
    """Attention of one layer, (1, T, H, D), of queries (1, H, T, D) to the keys of their own requests.

    The cache takes the new keys and values in and gives those of all tokens back, request after request.
    """
    cache = features["cache"]
    if not hasattr(cache, "update") or "cu_seq_lens_q" not in features:
        raise ArgumentError(
            f"cache: got {type(cache).__name__}; need a paged cache of transformers, with cu_seq_lens_q and what else "
            "continuous batching passes beside it"
        )
    if features.get("block_table") is not None:
        raise ArgumentError(
            "block_table: the decode path by flash_attn_with_kvcache is not offered; pass "
            "ContinuousBatchingConfig(max_blocks_per_request=0)"
        )
    key, value = cache.update(key, value, module.layer_idx, features)
    size = features.get("sliding_window")
    out = attention_varlen(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        features["cu_seq_lens_q"],
        features["cu_seq_lens_k"],
        mask=causal() if size is None else causal() & window(size),
        scale=scaling,
        softcap=features.get("softcap") or 0.0,
        sinks=features.get("s_aux"),
    )
    return out[None]
