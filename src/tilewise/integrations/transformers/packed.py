"""Sequences packed one after another in one row: `cu_seq_lens_q` and `cu_seq_lens_k` as a mask.

They come from `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` and reach every layer. transformers puts the boundaries
into its own masks only where there are position ids and no cache, so a layer cannot rely on that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.errors import ArgumentError
from tilewise.masks import Mask, documents


def packed_mask(query: Tensor, key: Tensor, features: dict[str, Any], is_causal: bool) -> Mask | None:
    """Each query sees the keys of its own sequence; None where no boundaries are given."""
    cu_q = features.get("cu_seq_lens_q")
    cu_k = features.get("cu_seq_lens_k", cu_q)
    if cu_q is None or cu_k is None:
        if cu_q is cu_k:
            return None
        raise ArgumentError("cu_seq_lens_q: one of cu_seq_lens_q and cu_seq_lens_k is None; need both, or the first alone")
    queries, keys = query.shape[2], key.shape[2]
    if query.shape[0] != 1:
        raise ArgumentError(
            f"cu_seq_lens_q: given for a batch of {query.shape[0]}, need one row that holds all sequences; for a padded batch "
            "leave it out and pass attention_mask"
        )
    if is_causal and queries != keys:
        raise ArgumentError(
            f"cu_seq_lens_k: {queries} packed queries over {keys} keys; a cache puts the new tokens of all sequences behind "
            "the old ones of all, which boundaries cannot describe. Continue sequences in a padded batch, or pass use_cache=False"
        )
    _check("cu_seq_lens_q", cu_q, queries)
    _check("cu_seq_lens_k", cu_k, keys)
    if cu_q.shape != cu_k.shape:
        raise ArgumentError(
            f"cu_seq_lens_k: bounds {cu_k.shape[0] - 1} sequences, cu_seq_lens_q {cu_q.shape[0] - 1}; need as many of keys as of "
            "queries"
        )
    return documents(_ids(cu_k, keys, key.device), q_ids=_ids(cu_q, queries, query.device))


def _check(name: str, bounds: Tensor, tokens: int) -> None:
    """Shapes always; values only where reading them waits for nothing."""
    if bounds.ndim != 1 or bounds.shape[0] < 2:
        raise ArgumentError(f"{name}: shape {tuple(bounds.shape)}, need one dimension of at least two bounds, 0 and {tokens}")
    if bounds.device.type != "cpu" or torch.compiler.is_compiling():
        return
    values = bounds.tolist()
    if values[0] != 0 or values[-1] != tokens:
        raise ArgumentError(f"{name}: ends at {values[-1]} and starts at {values[0]}, need bounds from 0 to {tokens}, all tokens")
    if sorted(values) != values:
        raise ArgumentError(f"{name}: {values} must not fall; need the cumulative lengths of the sequences")


def _ids(bounds: Tensor, tokens: int, device: torch.device) -> Tensor:
    """The number of the sequence each token belongs to, (1, tokens)."""
    position = torch.arange(tokens, device=device, dtype=bounds.dtype)
    return torch.bucketize(position, bounds[1:].to(device), right=True, out_int32=True)[None]
