"""Context parallelism on torch.distributed: attention over many machines, planned from the mask."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.distributed.call import attention as attention
    from tilewise.distributed.comparison import compare as compare
    from tilewise.distributed.context import ContextPlan as ContextPlan
    from tilewise.distributed.context import plan as plan
    from tilewise.distributed.links import measure_links as measure_links
    from tilewise.distributed.loss import average_gradients as average_gradients
    from tilewise.distributed.loss import mean_loss as mean_loss

_HOMES = {
    "call": ("attention",),
    "comparison": ("compare",),
    "context": ("ContextPlan", "plan"),
    "links": ("measure_links",),
    "loss": ("average_gradients", "mean_loss"),
}

__all__ = ["ContextPlan", "attention", "average_gradients", "compare", "mean_loss", "measure_links", "plan"]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"tilewise.distributed.{module}"), name)
            return value
    raise AttributeError(f"module 'tilewise.distributed' has no attribute {name!r}")
