"""A tiny configuration of any model type, from the names and the defaults of its fields.

Sizes go by what a field is called (`hidden_size`, `num_hidden_layers`, …), so that a type that is new in transformers needs no
entry here. Lists that give every layer its kind keep one layer of each kind.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import CONFIG_MAPPING

VOCABULARY = 64
WORDS = (3, 40)  # ids below and above are special tokens
POSITIONS = 128

SIZES: list[tuple[str, int]] = [
    (r"(?:.*_)?(?:num_)?(?:key_value|kv)_heads|num_kv_heads|n_kv_heads|multi_query_group_num", 2),
    (r"(?:.*_)?(?:attention_heads|n_heads?|num_heads|num_key_heads|num_value_heads|mamba_n_heads|index_n_heads)", 4),
    (r"(?:.*_)?(?:num_)?(?:hidden_layers|layers|n_layers?|depth|num_blocks|num_stages)", 2),
    (r"qk_rope_head_dim|rotary_dim|index_topk", 4),
    (r"(?:.*_)?(?:head_dim|d_kv|dim_head|d_head|attention_head_size|head_size|kv_channels)", 8),
    (r"(?:.*_)?(?:experts_per_tok(?:en)?|moe_k|num_selected_experts|topk_experts|moe_topk|top_k)", 2),
    (r"(?:.*_)?(?:num_(?:local_)?experts|n_routed_experts|moe_num_experts)", 4),
    (r"n_group|topk_group|num_expert_groups?|mamba_n_groups|n_groups", 1),
    (r"(?:.*_)?(?:moe_intermediate_size|expert_ffn_hidden_size|moe_ffn_dim|shared_expert_intermediate_size)", 16),
    (r"(?:.*_)?(?:intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|intermediate_dim|feedforward_dim)", 48),
    (r"(?:.*_)?vocab_size(?:_.*)?|(?:.*_)?codebook_size|num_embeddings|num_codevectors_per_group", VOCABULARY),
    (r"(?:.*_)?(?:lora_rank)", 16),
    (r"(?:.*_)?(?:max_)?(?:position_embeddings|positions|seq_len|sequence_length|seq_length|target_positions)", POSITIONS),
    (r"(?:.*_)?max_source_positions", 12),
    (r"(?:.*_)?num_mel_bins|feature_size|num_mel_channels", 8),
    (r"(?:.*_)?(?:image_size|img_size|input_size)", 32),
    (r"(?:.*_)?(?:patch_size)", 8),
    (r"(?:.*_)?sliding_window|attention_window|local_attention|window_size|attention_chunk_size|local_window_size", 4),
    (r"(?:.*_)?num_queries|num_query_tokens|num_latents|num_labels", 6),
    (r"(?:.*_)?(?:hidden_size|d_model|n_embd|embed_dim|hidden_dim|projection_dim|emb_dim|embedding_size|dim|width)", 32),
    (r"(?:.*_)?(?:channels|output_size|proj_size|codevector_dim|output_dim|out_features|filters)", 32),
    (r"(?:.*_)?(?:state_size|d_state|rank|ssm_state_size)", 8),
]
"""Names of fields, and the largest value they get; the first pattern that matches counts."""
KEEP = re.compile(
    r"in_channels|num_feat_extract_layers|num_conv_pos.*|num_channels|type_vocab_size|.*_idx|.*_id|.*_ids|.*temperature|.*_base|.*_theta|rope_.*"
)
KINDS = re.compile(r"layer_types|layers_block_type|attention_layers|block_types|hybrid_override_pattern")
"""Lists with a kind for each layer."""

EXTRA: dict[str, dict[str, Any]] = {}
"""What a type needs beside the rules."""


def tiny(model_type: str) -> Any:
    """A small configuration of the type; raises what its class raises."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**{**fields(kind, kind()), **EXTRA.get(model_type, {})})


def fields(kind: Any, default: Any) -> dict[str, Any]:
    """Arguments that make a configuration like `default` small."""
    made: dict[str, Any] = {}
    special = VOCABULARY - 1
    for name, value in vars(default).items():
        if hasattr(value, "to_dict"):
            if name in getattr(kind, "sub_configs", {}):
                sub = fields(type(value), value)
                if "model_type" in value.to_dict():
                    sub["model_type"] = value.model_type
                made[name] = sub
        elif name.startswith("_") or name in getattr(kind, "attribute_map", {}):
            continue
        elif re.fullmatch(r".*_token_(id|index)|.*_index", name) and isinstance(value, int) and value >= VOCABULARY:
            made[name] = special
            special -= 1
        elif KINDS.fullmatch(name) and isinstance(value, list) and value and isinstance(value[0], str):
            made[name] = list(dict.fromkeys(value))[:4]
            if len(made[name]) == 1:
                made[name] *= 2
        elif isinstance(value, int) and not isinstance(value, bool) and not KEEP.fullmatch(name):
            small = size(name, value)
            if small is not None:
                made[name] = small
    if default_heads(default) is not None and default_heads(default) == getattr(default, "num_key_value_heads", None):
        made["num_key_value_heads"] = made.get("num_attention_heads")
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        made["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}  # halves of a head of 8
    for name in KINDS.pattern.split("|"):
        if name in made and "num_hidden_layers" in made:
            made["num_hidden_layers"] = len(made[name])
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **made}


def default_heads(default: Any) -> int | None:
    heads = getattr(default, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def size(name: str, value: int) -> int | None:
    for pattern, most in SIZES:
        if re.fullmatch(pattern, name):
            return min(value, most)
    return None
