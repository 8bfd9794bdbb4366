"""Arguments that `attention` does not have, and what to write instead: names from SDPA, flash_attn and others, and typos."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from tilewise.errors import ArgumentTypeError

_CAUSAL = "mask=tw.causal(), or tw.causal(align='top_left'), which is SDPA's where queries and keys differ in number"
_DENSE = "mask=m for a boolean tensor (True = attend) or a mask such as tw.causal(), bias=m for a tensor that is added"
_PADDING = "mask=tw.key_padding(lengths), or mask=m[:, None, None, :] for booleans (batch, keys), True = attend"
_SCALE = "scale="
_WINDOW = "mask=tw.causal() & tw.window(n) for the last n keys, or tw.window(left, right) for keys before and after"
_CAP = "softcap="
_SINKS = "sinks=, a tensor (heads,)"
_LSE = "return_lse=True"
_WEIGHTS = "nothing: the weights are never stored; return_lse=True gives what they can be recomputed from"
_PACKED = "tw.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k), which needs no maximum lengths"
_CACHE = "mask=tw.causal(offset=lengths - queries) over the whole cache"
_SDPA = "; tw.sdpa takes SDPA's own arguments"
_FLASH = "; tilewise.integrations.flash_attn takes flash_attn's own arguments"

INSTEAD = {
    "is_causal": _CAUSAL + _SDPA,
    "attn_mask": _DENSE + _SDPA,
    "enable_gqa": "nothing: fewer key heads than query heads are grouped" + _SDPA,
    "dropout": "dropout_p=",
    "p_dropout": "dropout_p=",
    "attention_dropout": "dropout_p=",
    "causal": _CAUSAL + _FLASH,
    "softmax_scale": _SCALE + _FLASH,
    "window_size": _WINDOW + _FLASH,
    "alibi_slopes": "bias=tw.alibi(slopes)" + _FLASH,
    "return_attn_probs": _LSE + _FLASH,
    "cu_seqlens": _PACKED,
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "max_seqlen": _PACKED,
    "max_seqlen_q": _PACKED,
    "max_seqlen_k": _PACKED,
    "cache_seqlens": _CACHE + _FLASH,
    "key_padding_mask": _PADDING,
    "padding_mask": _PADDING,
    "attention_mask": f"{_PADDING}; for any other, {_DENSE}",
    "attn_bias": "bias=",
    "score_mod": "bias=, softcap= or tw.alibi(slopes)",
    "block_mask": "a mask such as tw.causal() & tw.documents(ids), or tw.blocks(table, size)",
    "sm_scale": _SCALE,
    "scaling": _SCALE,
    "sliding_window": _WINDOW,
    "soft_cap": _CAP,
    "logits_soft_cap": _CAP,
    "logit_cap": _CAP,
    "sink": _SINKS,
    "s_aux": _SINKS,
    "learnable_sink": _SINKS,
    "return_softmax_lse": _LSE,
    "need_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_attn_weights": _WEIGHTS,
    "generator": "seed=, an int or a tensor with one integer",
    "training": "dropout_p=0.0 where nothing is to be dropped",
    "batch_first": "layout='bshd' or 'bhsd'",
    "input_layout": "layout='bshd' or 'bhsd'",
}
"""What people know by another name -> what to write here."""


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise for keywords that `function` does not take, with what to write instead of each."""
    lines = []
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, 1)
            instead = INSTEAD.get(name) or (f"{close[0]}=" if close else f"one of {', '.join(known)}")
            lines.append(f"{name}: {function} has no such argument; use {instead}")
    if lines:
        raise ArgumentTypeError("\n".join(lines))
