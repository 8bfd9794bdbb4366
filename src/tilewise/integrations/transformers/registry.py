"""Entering transformers' own registries.

Two methods of transformers are extended: where a model checks the name of its implementation, it also refuses what cannot be
served; and where it looks for the package behind a name with "flash" in it, it does not for tilewise's names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from tilewise.errors import ArgumentError, MissingPackageError
from tilewise.integrations.transformers.attention import attention_function
from tilewise.integrations.transformers.masks import mask_function
from tilewise.integrations.transformers.refusal import guard, refuse

NAME = "tilewise"
CONTINUOUS = "tilewise_flash"
"""The name for continuous batching, which wants "flash" in it."""


class RegistryError(MissingPackageError):
    """transformers is missing, or too old to have the registries."""


def register(name: str = NAME) -> None:
    """Make `attn_implementation="tilewise"` (or `name`) known to transformers. Doing it again changes nothing.

    name: what models call it; the name of another implementation is refused. One with "flash" in it serves continuous
        batching, too; without a name, "tilewise_flash" is registered beside "tilewise".

    Afterwards a model that computes its attention itself, and so cannot be served, raises when it is made with that name.

    >>> register()
    >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tilewise")
    """
    attention, masks, model = registries()
    if name == NAME:
        register(CONTINUOUS)
    known = {**attention._global_mapping, "eager": None}
    if name in known and known[name] is not attention_function:
        raise ArgumentError(
            f"name: {name!r} is the name of another attention implementation of transformers; choose one that is free, "
            f"such as {NAME!r}"
        )
    attention.register(name, attention_function)
    masks.register(name, mask_function)

    def own(name: str) -> bool:
        return attention._global_mapping.get(name) is attention_function

    guard(model, own)
    if "flash" in name:
        _accept(model, own)


def use_tilewise(model: Any) -> Any:
    """Let an existing model compute its attention with tilewise.

    model: a PreTrainedModel.

    Returns the model. Raises for a model that computes attention on its own, where transformers would accept the name and go on
    as before.

    >>> model = use_tilewise(AutoModelForCausalLM.from_pretrained(path))
    """
    register()
    if not hasattr(type(model), "_can_set_attn_implementation"):
        raise ArgumentError(f"model: got {type(model).__name__}, need a transformers PreTrainedModel")
    refuse(model, NAME)
    model.set_attn_implementation(NAME)
    return model


def _accept(model: Any, own: Callable[[str], bool]) -> None:
    """Let `model` (PreTrainedModel) take our names for what they are, though "flash" is in them: no package, and no list of
    packages that a model may be limited to."""
    adjust = model._check_and_adjust_attn_implementation
    if hasattr(adjust, "tilewise"):
        return

    @wraps(adjust)
    def adjusted(self: Any, attn_implementation: str | None, is_init_check: bool = False, **kwargs: Any) -> str:
        if attn_implementation is not None and own(attn_implementation):
            name: str = self.get_correct_attn_implementation(attn_implementation, is_init_check)
        else:
            name = adjust(self, attn_implementation, is_init_check, **kwargs)
        return name

    adjusted.tilewise = True  # type: ignore[attr-defined]
    model._check_and_adjust_attn_implementation = adjusted


def registries() -> tuple[Any, Any, Any]:
    try:
        import transformers
    except ImportError as error:
        raise RegistryError("transformers is not installed; pip install 'tilewise[transformers]'") from error
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as error:
        raise RegistryError(
            f"transformers {getattr(transformers, '__version__', '?')} has no registry of attention and mask functions "
            "(AttentionInterface and AttentionMaskInterface); pip install 'transformers>=5'"
        ) from error
    return AttentionInterface, AttentionMaskInterface, PreTrainedModel
