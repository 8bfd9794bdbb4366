"""Entering transformers' own registries; nothing of transformers is replaced."""

from __future__ import annotations

from typing import Any

from tilewise.errors import ArgumentError, TilewiseError
from tilewise.integrations.transformers.attention import attention_function
from tilewise.integrations.transformers.masks import mask_function

NAME = "tilewise"


class RegistryError(TilewiseError, ImportError):
    """transformers is missing, or too old to have the registries."""


def register(name: str = NAME) -> None:
    """Make `attn_implementation="tilewise"` (or `name`) known to transformers. Doing it again changes nothing.

    A name that belongs to another implementation is refused.
    """
    attention, masks = _registries()
    taken = {**attention._global_mapping, "eager": None}
    if name in taken and taken[name] is not attention_function:
        raise ArgumentError(
            f"name: {name!r} is the name of another attention implementation of transformers; choose one that is free, "
            f"such as {NAME!r}"
        )
    attention.register(name, attention_function)
    masks.register(name, mask_function)


def use_tilewise(model: Any) -> Any:
    """Let an existing model compute its attention with tilewise; returns the model.

    Raises for a model that computes attention on its own, where transformers would accept the name and go on as before.
    """
    register()
    able = getattr(type(model), "_can_set_attn_implementation", None)
    if not hasattr(model, "set_attn_implementation") or able is None:
        raise ArgumentError(f"model: got {type(model).__name__}, need a transformers PreTrainedModel")
    if not able() or not _supported(model):
        raise ArgumentError(
            f"model: {type(model).__name__} computes its attention itself and not through transformers' registry, so no "
            "implementation can be put in; `with tilewise.replace_sdpa():` serves it if it calls SDPA"
        )
    model.set_attn_implementation(NAME)
    return model


def _supported(model: Any) -> bool:
    """Whether the model's authors declare that any registered implementation may serve it."""
    return bool(getattr(model, "_supports_attention_backend", True) or getattr(model, "_supports_sdpa", False))


def _registries() -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError as error:
        raise RegistryError("transformers is not installed; pip install 'tilewise[transformers]'") from error
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise RegistryError(
            f"transformers {getattr(transformers, '__version__', '?')} has no registry of attention and mask functions "
            "(AttentionInterface and AttentionMaskInterface); pip install 'transformers>=5'"
        ) from error
    return AttentionInterface, AttentionMaskInterface
