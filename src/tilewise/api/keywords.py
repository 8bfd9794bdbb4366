"""Arguments that `attention` does not have, and what to write instead: names from SDPA, flash_attn and others, and typos."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from tilewise.errors import ArgumentTypeError

_DENSE = "mask=m for a boolean tensor (True = attend) or a mask such as tw.causal(), bias=m for a tensor that is added"
_PADDING = "mask=tw.key_padding(lengths), or mask=m[:, None, None, :] for booleans (batch, keys), True = attend"
_OWN = {
    "; tw.sdpa takes SDPA's own arguments": "is_causal attn_mask enable_gqa",
    "; tilewise.integrations.flash_attn takes flash_attn's own arguments": (
        "causal softmax_scale window_size alibi_slopes return_attn_probs cache_seqlens"
    ),
}
_ADVICE = {
    "mask=tw.causal(), or tw.causal(align='top_left'), which is SDPA's where queries and keys differ in number": (
        "is_causal causal"
    ),
    _DENSE: "attn_mask",
    "nothing: fewer key heads than query heads are grouped": "enable_gqa",
    "dropout_p=": "dropout p_dropout attention_dropout",
    "scale=": "softmax_scale sm_scale scaling",
    "mask=tw.causal() & tw.window(n) for the last n keys, or tw.window(left, right) for keys before and after": (
        "window_size sliding_window"
    ),
    "bias=tw.alibi(slopes)": "alibi_slopes",
    "return_lse=True": "return_attn_probs return_softmax_lse",
    "tw.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k), which needs no maximum lengths": (
        "cu_seqlens cu_seqlens_q cu_seqlens_k max_seqlen max_seqlen_q max_seqlen_k"
    ),
    "mask=tw.causal(offset=lengths - queries) over the whole cache": "cache_seqlens",
    _PADDING: "key_padding_mask padding_mask",
    f"{_PADDING}; for any other, {_DENSE}": "attention_mask",
    "bias=": "attn_bias",
    "bias=, softcap= or tw.alibi(slopes)": "score_mod",
    "a mask such as tw.causal() & tw.documents(ids), or tw.blocks(table, size)": "block_mask",
    "softcap=": "soft_cap logits_soft_cap logit_cap",
    "sinks=, a tensor (heads,)": "sink s_aux learnable_sink",
    "nothing: the weights are never stored; return_lse=True gives what they can be recomputed from": (
        "need_weights output_attentions return_attn_weights"
    ),
    "seed=, an int or a tensor with one integer": "generator",
    "dropout_p=0.0 where nothing is to be dropped": "training",
    "layout='bshd' or 'bhsd'": "batch_first input_layout",
}
_owner = {name: text for text, names in _OWN.items() for name in names.split()}
INSTEAD = {name: text + _owner.get(name, "") for text, names in _ADVICE.items() for name in names.split()}
"""What people know by another name -> what to write here."""


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise for keywords that `function` does not take, with what to write instead of each."""
    unknown = set(given).difference(known)
    lines = []
    for name in given if unknown else ():
        if name in unknown:
            close = get_close_matches(name, known, 1)
            instead = INSTEAD.get(name) or (f"{close[0]}=" if close else f"one of {', '.join(known)}")
            lines.append(f"{name}: {function} has no such argument; use {instead}")
    if lines:
        raise ArgumentTypeError("\n".join(lines))
