"""Exact attention, computed tile by tile, that knows what it costs.

>>> import tilewise as tw
>>> out = tw.attention(q, k, v, mask=tw.causal() & tw.window(4096))

Importing this package does nothing: names are looked up in their modules when first used (PEP 562), so that
`import tilewise.model` needs no torch and no backend is probed before it is asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tilewise.api.attention import attention as attention
    from tilewise.api.backends import backends as backends
    from tilewise.api.bias import alibi as alibi
    from tilewise.api.varlen import attention_varlen as attention_varlen
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
    from tilewise.masks import window as window
    from tilewise.problem import Problem as Problem

# public name -> the module that holds it
_HOMES = {
    "attention": "api.attention",
    "attention_varlen": "api.varlen",
    "alibi": "api.bias",
    "plan": "diagnostics.plan",
    "explain": "diagnostics.explain",
    "certify": "diagnostics.certify",
    "trace_nonfinite": "diagnostics.trace",
    "TilewiseError": "errors",
    "Mask": "masks",
    "full": "masks",
    "causal": "masks",
    "window": "masks",
    "prefix": "masks",
    "documents": "masks",
    "blocks": "masks",
    "key_padding": "masks",
    "dense": "masks",
    "Problem": "problem",
    "sdpa": "integrations.sdpa",
    "replace_sdpa": "integrations.sdpa",
}

__all__ = ["__version__", "backends", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in ("backends", "nn"):
        return import_module(f"tilewise.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    value = getattr(import_module(f"tilewise.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "nn"])


class _Backends(ModuleType):
    """The package `tilewise.backends`, which is also the function `tilewise.backends()`."""

    def __call__(self, device: str | None = None) -> Any:
        return import_module("tilewise.api.backends").backends(device)


class _Tilewise(ModuleType):
    """`backends` names a package and a public function; whoever imports the package first gets both."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "backends" and isinstance(value, ModuleType):
            value.__class__ = _Backends
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Tilewise
