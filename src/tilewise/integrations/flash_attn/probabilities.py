"""The N × N probabilities `return_attn_probs` asks for: for tests, signed by what dropout did to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.masks import Binding, MaskShape, allowed
from tilewise.numerics.philox import keep_tile


class Batch(NamedTuple):
    """Sequences of one length."""

    q: Tensor  # (B, Hq, M, D)
    k: Tensor  # (B, Hk, N, D)
    lse: Tensor  # (B, Hq, M)


@torch.no_grad()
def signed_probabilities(batches: Sequence[Batch], options: dict[str, Any]) -> list[Tensor]:
    """P in the dtype of q, one (B, H, M, N) for each batch: positive where kept, negative where dropped, 0 where masked."""
    first = 0
    found = []
    for batch in batches:
        found.append(_signed(batch, options, first))
        first += batch.q.shape[0]
    return found


def _signed(batch: Batch, options: dict[str, Any], first: int) -> Tensor:
    q, k, lse = batch.q.to(batch.lse.dtype), batch.k.to(batch.lse.dtype), batch.lse
    count, heads, queries, dim = q.shape
    keys = k.shape[2]
    device = q.device
    k = k.repeat_interleave(heads // max(k.shape[1], 1), dim=1)
    scale, softcap = options["scale"], options["softcap"]
    scores = (q @ k.mT) * (1.0 / math.sqrt(dim) if scale is None else scale)  # [B, H, M, N]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if options["bias"] is not None:
        slopes = options["bias"].slopes.to(scores.dtype)
        slopes = (slopes if slopes.ndim == 1 else slopes[first : first + count])[..., None, None]
        place = torch.arange(queries, device=device)[:, None] + keys - queries
        scores = scores - slopes * (place - torch.arange(keys, device=device)).abs()
    shape = MaskShape(count, heads, queries, keys)
    seen = allowed(
        options["mask"].lower(Binding(shape)),
        shape,
        (0, queries),
        (0, keys),
        lambda lo, hi: torch.arange(lo, hi, device=device),
    )
    weights = torch.exp(scores - lse[..., None])
    if seen is not None:
        weights = torch.where(seen, weights, 0.0)
    ids = range(first, first + count), range(heads), range(queries), range(keys)
    kept = keep_tile(options["seed"], options["dropout_p"], *ids, device=device)
    return torch.where(kept, weights, -weights).to(batch.q.dtype)
