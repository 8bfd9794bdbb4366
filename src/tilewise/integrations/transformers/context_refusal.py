"""What context parallelism does not serve, refused before anything is computed: its result would not be one machine's."""

from __future__ import annotations

from typing import Any

from tilewise.errors import ArgumentError

SERVED = ("full_attention", "sliding_attention")
CALL = {
    "past_key_values": "a cache",
    "use_cache": "a cache",
    "output_attentions": "attention weights, of Sq × Sk elements",
    "output_router_logits": "a balancing loss of the routers, which is no sum over tokens",
    "logits_to_keep": "the logits of the last tokens",
    "token_type_ids": "token types",
}
"""Arguments of a forward that change its result, and what they ask for."""
KNOWN = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("num_items_in_batch", "ignore_index", "output_hidden_states", "return_dict"),
)


def check_model(model: Any) -> None:
    """Raise for a model whose layers mix tokens otherwise than by causal attention, or whose loss is not one of tokens."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "sub_configs", None):
        raise _refused(model, "it has several parts", "pass the language model inside it")
    if getattr(model, "_is_stateful", False):
        raise _refused(model, "its layers carry a state from token to token")
    unserved = sorted({*(getattr(config, "layer_types", None) or ())} - {*SERVED})
    if unserved or getattr(config, "attention_chunk_size", None):
        raise _refused(model, f"it has layers of {', '.join(unserved) or 'chunked attention'}; served are {', '.join(SERVED)}")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise _refused(model, "its attention is not causal")
    if getattr(config, "output_router_logits", False):
        raise _refused(model, CALL["output_router_logits"], "set config.output_router_logits = False")
    if model.base_model is not model and getattr(model, "loss_type", None) != "ForCausalLM":
        raise _refused(model, "its head is not one of next tokens", "pass the model without its head, model.base_model")


def _refused(model: Any, why: str, instead: str = "") -> ArgumentError:
    return ArgumentError(
        f"model: {type(model).__name__} cannot be divided over tokens: {why}{'; ' if instead else ''}{instead}"
    )


def check_call(inputs: dict[str, Any]) -> None:
    """Raise for arguments of a forward whose meaning is lost when tokens are divided."""
    for name, meaning in CALL.items():
        value = inputs.get(name)
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            raise ArgumentError(
                f"{name}: asks for {meaning}, which a model under context parallelism does not offer; call remove() of what "
                "use_context_parallel returned, and call the model on one rank"
            )
    unknown = [name for name in inputs if name not in KNOWN and name not in CALL and inputs[name] is not None]
    if unknown:
        raise ArgumentError(
            f"{unknown[0]}: unknown to context parallelism, which must know how the tokens in an argument lie; known are "
            f"{', '.join(KNOWN)}"
        )
    if (inputs.get("input_ids") is None) == (inputs.get("inputs_embeds") is None):
        raise ArgumentError("input_ids: need exactly one of input_ids and inputs_embeds")


def refuse_generation(*args: Any, **kwargs: Any) -> None:
    """What `generate` becomes."""
    raise ArgumentError(
        "generate: not offered under context parallelism, where every rank has other tokens; call remove() of what "
        "use_context_parallel returned, and generate on one rank"
    )
