"""From a problem and a machine to tiles, with reasons.

Names are looked up when first used: a backend that asks for a tile need not load what explains one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.iomodel.tile import TilePlan as TilePlan
    from tilewise.planner.cpu import CpuTile as CpuTile
    from tilewise.planner.cpu import cpu_tile as cpu_tile
    from tilewise.planner.decide import Alternative as Alternative
    from tilewise.planner.decide import Plan as Plan
    from tilewise.planner.decide import plan as plan
    from tilewise.planner.gpu import gpu_tile as gpu_tile

_HOMES = {
    "TilePlan": "iomodel.tile",
    "CpuTile": "planner.cpu",
    "cpu_tile": "planner.cpu",
    "gpu_tile": "planner.gpu",
    "Alternative": "planner.decide",
    "Plan": "planner.decide",
    "plan": "planner.decide",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tilewise.planner' has no attribute {name!r}")
    value = getattr(import_module(f"tilewise.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
