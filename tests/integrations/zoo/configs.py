"""A tiny configuration of any model type, from the names and the defaults of its fields.

Sizes go by what a field is called (`hidden_size`, `num_hidden_layers`, …), so that a type that is new in transformers needs no
entry here. Lists that give every layer its kind keep one layer of each kind.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
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

LISTS: dict[str, Callable[[list[int]], list[int]]] = {
    "image_size": lambda x: [32] * len(x),
    "depths": lambda x: [1] * len(x),
    "num_heads": lambda x: [2**i for i in range(len(x))],
    "hidden_sizes": lambda x: [16 * 2**i for i in range(len(x))],
    "neck_hidden_sizes": lambda x: [16] * len(x),
    "conv_dim": lambda x: [16] * len(x),
    "tdnn_dim": lambda x: [16] * len(x),
}
"""Lists with a size for each stage or side."""

OPEN: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": VOCABULARY,
    "sliding_window": 4,
}
"""For fields whose default is None."""
MULTIMODAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
VARIANTS: list[dict[str, Any]] = [
    {},
    OPEN,
    {**OPEN, "rope_parameters": {**MULTIMODAL_ROPE, "mrope_section": [2, 1, 1]}},
    {"rope_parameters": {**MULTIMODAL_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
]
"""Tried in turn until a model runs: fields that are left open, and sections of rotary embeddings that must fill a head."""

EXTRA: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 16, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_head": 16, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {"mamba_d_head": 16, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32, "embedding_size": 32},
}
"""What a type needs beside the rules."""


def tiny(model_type: str, variant: dict[str, Any]) -> Any:
    """A small configuration of the type; raises what its class raises."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    return kind(**{**fields(kind, default, variant), **EXTRA.get(model_type, {})})


def fields(kind: Any, default: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """Arguments that make a configuration like `default` small."""
    made: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    special = VOCABULARY - 1
    for name, value in vars(default).items():
        if name.startswith("_") or name in getattr(kind, "attribute_map", {}):
            continue
        if hasattr(value, "to_dict"):
            if name in getattr(kind, "sub_configs", {}):
                made[name] = {**fields(type(value), value, variant), "model_type": value.model_type}
        elif re.fullmatch(r".*_token_(id|index)|.*_index", name) and isinstance(value, int) and value >= VOCABULARY:
            made[name] = special
            special -= 1
        elif isinstance(value, (list, tuple)) and value:
            small = listed(name, list(value))
            if small is not None:
                made[name] = small
        elif isinstance(value, int) and not isinstance(value, bool) and not KEEP.fullmatch(name):
            number = size(name, value)
            if number is not None:
                made[name] = number
            if name.endswith("key_value_heads") and value == getattr(default, name.replace("key_value", "attention"), None):
                made[name] = 4
    for name in KINDS.pattern.split("|"):
        if name in made and "num_hidden_layers" in made:
            made["num_hidden_layers"] = len(made[name])
    if "qk_rope_head_dim" in made:  # latent attention: the other widths follow from two
        made.pop("head_dim", None)
        made["qk_head_dim"] = made["qk_rope_head_dim"] + made.get("qk_nope_head_dim", 0)
    for name, value in variant.items():
        if name in vars(default) and (getattr(default, name) is None or name == "rope_parameters"):
            made[name] = copy.deepcopy(value)  # classes write into it
    return made


def listed(name: str, value: list[Any]) -> list[Any] | None:
    if KINDS.fullmatch(name) and isinstance(value[0], str):
        kinds = list(dict.fromkeys(value))[:4]
        return kinds * 2 if len(kinds) == 1 else kinds
    if name in LISTS and isinstance(value[0], int):
        return LISTS[name](value)
    return None


def size(name: str, value: int) -> int | None:
    for pattern, most in SIZES:
        if re.fullmatch(pattern, name):
            return min(value, most)
    return None
