"""The attention of a model, from its configuration as transformers writes it: one problem for each kind of layer and call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewise.errors import ArgumentError
from tilewise.masks import Mask, causal, full, window
from tilewise.problem import ALIASES, ITEMSIZE, Problem

TOKENS = 4096
"""Of a prompt, unless the model takes fewer."""
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta", "deberta-v2", "modernbert", "vit", "siglip")
"""Models whose tokens see all others."""
WITH_SINKS = ("gpt_oss",)


def problems_of_config(config: Path | Mapping[str, Any] | Any, seqlen: int | None = None) -> list[Problem]:
    """Prompts of `seqlen` tokens, or as many as the model takes, and single new tokens after so many."""
    values = _values(config)
    heads = _integer(values, "num_attention_heads", "n_head", "num_heads")
    kv_heads = _integer(values, "num_key_value_heads", "num_kv_heads", default=heads)
    head_dim, head_dim_v = _head_dims(values, heads)
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = ALIASES.get(dtype, dtype)
    if dtype not in ITEMSIZE:
        raise ArgumentError(f"config: dtype is {dtype!r}, need one of {', '.join(ITEMSIZE)}")
    longest = _integer(values, "max_position_embeddings", "n_positions", "max_seq_len", default=TOKENS)
    tokens = min(longest, TOKENS if seqlen is None else seqlen)
    features: dict[str, Any] = {
        "kv_heads": kv_heads,
        "head_dim_v": head_dim_v,
        "dtype": dtype,
        "softcap": float(values.get("attn_logit_softcapping") or 0.0),
        "sinks": values.get("model_type") in WITH_SINKS,
        "alibi": bool(values.get("alibi")),
        "needs_lse": False,
        "interleaved": True,  # as projections leave them
    }
    found = []
    for mask in _masks(values):
        found.append(Problem.of(heads=heads, head_dim=head_dim, seqlen=tokens, mask=mask, **features))
        if mask != full():
            found.append(Problem.of(heads=heads, head_dim=head_dim, seqlen=1, kv_seqlen=tokens, mask=mask, **features))
    return found


def _values(config: Path | Mapping[str, Any] | Any) -> Mapping[str, Any]:
    if isinstance(config, Path):
        path = config / "config.json" if config.is_dir() else config
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ArgumentError(f"config: cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ArgumentError(f"config: {path} is no JSON: {error}") from error
    elif not isinstance(config, Mapping):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ArgumentError(f"config: got {type(config).__name__}, need an object of names and values")
    text = config.get("text_config")  # models that also see or hear
    return {**config, **text} if isinstance(text, Mapping) else config


def _integer(values: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"config: {name} is {value!r}, need a number from 1 on")
        return value
    if default is None:
        raise ArgumentError(f"config: has no {' or '.join(names)}; is it a model's configuration?")
    return default


def _head_dims(values: Mapping[str, Any], heads: int) -> tuple[int, int]:
    """Of queries and keys, and of values."""
    if values.get("qk_rope_head_dim") and values.get("qk_nope_head_dim"):
        head_dim = _integer(values, "qk_nope_head_dim") + _integer(values, "qk_rope_head_dim")
    elif values.get("head_dim"):
        head_dim = _integer(values, "head_dim")
    else:
        head_dim = max(1, _integer(values, "hidden_size", "n_embd", "d_model") // heads)
    return head_dim, _integer(values, "v_head_dim", default=head_dim)


def _masks(values: Mapping[str, Any]) -> list[Mask]:
    """One for each kind of layer."""
    if values.get("model_type") in ENCODERS:
        return [full()]
    width = values.get("sliding_window")
    kinds = set(values.get("layer_types") or ())
    if not width or values.get("use_sliding_window") is False:
        return [causal()]
    local = causal() & window(_integer(values, "sliding_window"))
    if not kinds:
        return [local]
    return [mask for kind, mask in (("full_attention", causal()), ("sliding_attention", local)) if kind in kinds] or [causal()]
