"""Models that no registered implementation can serve, refused before they compute anything.

A model may compute its attention itself and still make its mask through transformers' registry of masks. With a boolean mask
made for tilewise it would go wrong without an error, so it is refused when it is made or when its implementation is set. Nothing
here knows a model by name: transformers says whether a class asks the registry of attention functions, and the module a class
stands in shows how it makes masks and chooses its layers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any

import torch

from tilewise.errors import ArgumentError


def guard(base: Any, serves: Callable[[str], bool]) -> None:
    """Let `base` (PreTrainedModel) ask for a refusal where it checks an implementation's name that `serves` knows."""
    check = base.get_correct_attn_implementation
    if hasattr(check, "tilewise"):
        return

    @wraps(check)
    def checked(self: Any, *args: Any, **kwargs: Any) -> str:
        name: str = check(self, *args, **kwargs)
        if serves(name):
            refuse(self, name)
        return name

    checked.tilewise = True  # type: ignore[attr-defined]
    base.get_correct_attn_implementation = checked


def refuse(model: Any, name: str) -> None:
    """Raise if the model would go wrong, or if nothing of it is served; warn if it is a part that stays as it is.

    A part without masks from the registry computes what it always did. Layers chosen by the implementation's name are made
    after this check, from tables that do not know ours: they are refused there, or stay as they are.
    """
    kind = type(model)
    module = sys.modules.get(kind.__module__)
    makes_masks = module is not None and _makes_masks(module)
    if not kind._can_set_attn_implementation():
        whole = not getattr(model.config, "base_config_key", "") and not getattr(model.config, "sub_configs", None)
        if makes_masks or whole:
            raise _refusal(kind.__name__, name)
        _warn_own(kind.__name__, name)
    for choice in _choices(module):
        if makes_masks and any(type(layer) in choice.values() for layer in model.modules()):
            raise _refusal(kind.__name__, name)
        if name not in choice:
            own = choice.get("sdpa", choice["eager"])
            choice[name] = partial(_refused if makes_masks else _warned, own, name)


def _makes_masks(module: Any) -> bool:
    """Whether code of the module makes masks through transformers' registry of mask functions."""
    makers = (v for n, v in vars(module).items() if n.startswith("create_") and n.endswith(("mask", "masks", "generate")))
    return any(getattr(v, "__module__", None) == "transformers.masking_utils" for v in makers)


def _choices(module: Any) -> Iterator[dict[str, Any]]:
    """Tables of a module that hold a layer class for each implementation, by its name."""
    for value in list(vars(module).values()) if module is not None else ():
        own = value.get("eager") if isinstance(value, dict) else None
        if isinstance(own, type) and issubclass(own, torch.nn.Module):
            yield value


def _refused(layer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    raise _refusal(layer.__name__, name)


def _warned(layer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    _warn_own(layer.__name__, name)
    return layer(*args, **kwargs)


@cache
def _warn_own(who: str, name: str) -> None:
    warnings.warn(
        f"{who} computes its attention itself: attn_implementation={name!r} serves the rest of the model and leaves this part "
        "as it is",
        stacklevel=6,
    )


def _refusal(who: str, name: str) -> ArgumentError:
    return ArgumentError(
        f"model: {who} computes its attention itself and does not ask transformers' registry of attention functions, so "
        f"attn_implementation={name!r} cannot serve it; leave it out (a model that calls SDPA is served inside "
        f"`with tilewise.replace_sdpa():`). In a model of several parts name those to be served, such as "
        f"attn_implementation={{'text_config': {name!r}}}"
    )
