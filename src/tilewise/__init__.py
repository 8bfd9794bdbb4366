"""Exact attention, computed tile by tile, that knows what it costs.

>>> import tilewise as tw
>>> out = tw.attention(q, k, v, mask=tw.causal() & tw.window(4096))

Importing this package does nothing: names are looked up in their modules when first used (PEP 562), so that
`import tilewise.model` needs no torch and no backend is probed before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tilewise.api.attention import attention as attention
    from tilewise.api.backends import backends as backends
    from tilewise.api.bias import alibi as alibi
    from tilewise.api.cache import KVCache as KVCache
    from tilewise.api.cached import attention_cached as attention_cached
    from tilewise.api.cached_plan import plan_cached as plan_cached
    from tilewise.api.merge import merge as merge
    from tilewise.api.rotary import rotary as rotary
    from tilewise.api.varlen import attention_varlen as attention_varlen
    from tilewise.api.warmup import warmup as warmup
    from tilewise.diagnostics.certify import certify as certify
    from tilewise.diagnostics.explain import explain as explain
    from tilewise.diagnostics.plan import plan as plan
    from tilewise.diagnostics.trace import trace_nonfinite as trace_nonfinite
    from tilewise.errors import TilewiseError as TilewiseError
    from tilewise.integrations.sdpa import replace_sdpa as replace_sdpa
    from tilewise.integrations.sdpa import sdpa as sdpa
    from tilewise.masks import Mask as Mask
    from tilewise.masks import blocks as blocks
    from tilewise.masks import causal as causal
    from tilewise.masks import dense as dense
    from tilewise.masks import documents as documents
    from tilewise.masks import full as full
    from tilewise.masks import key_padding as key_padding
    from tilewise.masks import prefix as prefix
    from tilewise.masks import selected as selected
    from tilewise.masks import tree as tree
    from tilewise.masks import window as window
    from tilewise.problem import Problem as Problem
    from tilewise.problem import top as top

# module -> the public names it holds; the imports above are the same list for type checkers
_HOMES = {
    "api.attention": ("attention",),
    "api.varlen": ("attention_varlen",),
    "api.cached": ("attention_cached",),
    "api.cached_plan": ("plan_cached",),
    "api.cache": ("KVCache",),
    "api.rotary": ("rotary",),
    "api.merge": ("merge",),
    "api.bias": ("alibi",),
    "api.warmup": ("warmup",),
    "diagnostics.plan": ("plan",),
    "diagnostics.explain": ("explain",),
    "diagnostics.certify": ("certify",),
    "diagnostics.trace": ("trace_nonfinite",),
    "errors": ("TilewiseError",),
    "masks": ("Mask", "full", "causal", "window", "prefix", "documents", "blocks", "selected", "tree", "key_padding", "dense"),
    "problem": ("Problem", "top"),
    "integrations.sdpa": ("sdpa", "replace_sdpa"),
}

__all__ = ["__version__", "backends", *chain.from_iterable(_HOMES.values())]


def __getattr__(name: str) -> Any:
    if name in ("backends", "nn", "distributed"):
        return import_module(f"tilewise.{name}")
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"tilewise.{module}"), name)
            return value
    raise AttributeError(f"module 'tilewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "distributed", "nn"])
