"""The attention function models call through transformers' registry."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilewise.api.attention import attention
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError
from tilewise.integrations.transformers.continuous import attend_packed
from tilewise.integrations.transformers.packed import packed_mask
from tilewise.integrations.transformers.promise import PromisedMask
from tilewise.integrations.weights import attention_weights
from tilewise.masks import Mask, causal, dense, full, window

UNSERVED = {
    "indices": "attention to selected keys,",
    "block_indices": "attention to selected blocks,",
}
"""Arguments of other attention functions that change the result, and what they ask for."""


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    **features: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer: q, k, v are (B, H, S, D), the result is (B, Sq, H, D), and the weights if they are asked for.

    The mask says everything about visibility, as it does for `eager`. Only where a model made none do `is_causal` and
    `sliding_window` count, as they do for the other fused implementations. Boundaries of packed sequences
    (`cu_seq_lens_q`, `cu_seq_lens_k`) join either.
    """
    refuse_unserved(module, features)
    if features.get("cache") is not None:
        return attend_packed(module, query, key, value, scaling, features), None
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    mask, bias = _masked(attention_mask)
    if attention_mask is None:
        mask = _unmasked(query, key, bool(is_causal), features.get("sliding_window"))
    sequences = packed_mask(query, key, features, bool(is_causal))
    if sequences is not None:
        mask = sequences if mask is None else mask & sequences
    position_bias = features.get("position_bias")
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if isinstance(scaling, Tensor):  # a learned scale: its gradient flows through q
        query, scaling = query * scaling, 1.0
    wanted = _wants_weights(features)
    options: dict[str, Any] = {
        "mask": mask,
        "scale": scaling,
        "bias": bias,
        "softcap": features.get("softcap") or 0.0,
        "sinks": features.get("s_aux"),
        "dropout_p": dropout,
        "seed": torch.randint(2**62, (), device=query.device) if wanted and dropout else None,
    }
    out = attention(query, key, value, deterministic=features.get("deterministic"), **options)
    weights = torch.cat([part.after for part in attention_weights(query, key, options)]) if wanted else None
    return out.transpose(1, 2).contiguous(), weights


def refuse_unserved(module: torch.nn.Module, features: dict[str, Any]) -> None:
    """Raise for what changes the result and is not offered."""
    for name, meaning in UNSERVED.items():
        if features.get(name) is not None and features[name] is not False:
            raise ArgumentError(
                f"{name}: {type(module).__name__} asks for {meaning} which attn_implementation='tilewise' does not offer; "
                "use model.set_attn_implementation('eager')"
            )


def _masked(attention_mask: Tensor | None) -> tuple[Mask | None, Tensor | None]:
    """The mask a model passes, as tilewise's mask or bias; neither for none."""
    if attention_mask is None:
        return None, None
    if isinstance(attention_mask, PromisedMask):
        return attention_mask.description, None
    if attention_mask.ndim != 4:
        raise LayoutError(
            f"attention_mask: shape {tuple(attention_mask.shape)}, need rank 4 (batch, 1 or heads, queries, keys) by the time "
            "it reaches a layer; models make it from the 2-D mask with transformers.masking_utils"
        )
    if attention_mask.dtype == torch.bool:
        return dense(attention_mask), None
    if not attention_mask.is_floating_point():
        raise ArgumentTypeError(
            f"attention_mask: dtype {attention_mask.dtype}, need bool (True = attend) or floating point (added to the scores)"
        )
    return None, attention_mask


def _unmasked(query: Tensor, key: Tensor, is_causal: bool, sliding_window: int | None) -> Mask:
    """The mask of a call without one. A single query is the newest token and sees everything before it."""
    if not is_causal:
        return full()
    if query.shape[2] == 1:
        return full() if sliding_window is None else window(sliding_window)
    if query.shape[2] != key.shape[2]:
        raise ArgumentError(
            f"attention_mask: None, with {query.shape[2]} causal queries over {key.shape[2]} keys, does not say where the "
            "queries stand; the model must make its mask with transformers.masking_utils, or pass one"
        )
    return causal() if sliding_window is None else causal() & window(sliding_window)


def _wants_weights(features: dict[str, Any]) -> bool:
    """Whether the caller of the model wants weights. Not every layer passes that on; the model's collector, which a compiled
    graph cannot ask, knows too."""
    wanted = features.get("output_attentions")
    if wanted is not None or torch.compiler.is_compiling():
        return bool(wanted)
    collector = _collector()
    collected = collector.get() if collector is not None else None
    return any(name.endswith("attentions") for name in collected or ())


@cache
def _collector() -> Any:
    """Where transformers gathers what layers return during a forward; None where it has none."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector
