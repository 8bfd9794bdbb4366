"""Context parallelism on torch.distributed: attention over many machines, planned from the mask."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.distributed.call import attention as attention
    from tilewise.distributed.comparison import compare as compare
    from tilewise.distributed.context import ContextPlan as ContextPlan
    from tilewise.distributed.context import plan as plan

_HOMES = {"call": ("attention",), "comparison": ("compare",), "context": ("ContextPlan", "plan")}

__all__ = ["ContextPlan", "attention", "compare", "plan"]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"tilewise.distributed.{module}"), name)
            return value
    raise AttributeError(f"module 'tilewise.distributed' has no attribute {name!r}")
