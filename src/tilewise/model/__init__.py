"""The IO model: on-chip bytes, traffic, FLOPs and time of attention, by arithmetic; and the tile that costs least.

Three counts of bytes are kept apart: `compulsory` (each tensor once), tile bytes (what a schedule moves between L2 and
the units: `standard`, `v1`, `v2`, `decode` and the backward passes) and `dram` (what of them L2 lets through).

Names are looked up when first used: choosing a tile needs only a part of this.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.model.cpu import cpu_tile as cpu_tile
    from tilewise.model.decide import Plan as Plan
    from tilewise.model.decide import plan as plan
    from tilewise.model.evaluation import Evaluation as Evaluation
    from tilewise.model.evaluation import evaluate as evaluate
    from tilewise.model.flops import Work as Work
    from tilewise.model.flops import visible_pairs as visible_pairs
    from tilewise.model.flops import work as work
    from tilewise.model.gpu import gpu_tile as gpu_tile
    from tilewise.model.l2 import dram as dram
    from tilewise.model.onchip import kernel as kernel
    from tilewise.model.roof import Roofline as Roofline
    from tilewise.model.roof import roofline as roofline
    from tilewise.model.schedules import SCHEDULES as SCHEDULES
    from tilewise.model.schedules import Traffic as Traffic
    from tilewise.model.schedules import compulsory as compulsory
    from tilewise.model.schedules import decode as decode
    from tilewise.model.schedules import standard as standard
    from tilewise.model.schedules import traffic as traffic
    from tilewise.model.schedules import v1 as v1
    from tilewise.model.schedules import v2 as v2
    from tilewise.model.tile import TilePlan as TilePlan

_NAMES = {
    "cpu": ("cpu_tile",),
    "decide": ("Plan", "plan"),
    "evaluation": ("Evaluation", "evaluate"),
    "flops": ("Work", "visible_pairs", "work"),
    "gpu": ("gpu_tile",),
    "l2": ("dram",),
    "onchip": ("kernel",),
    "roof": ("Roofline", "roofline"),
    "schedules": ("SCHEDULES", "Traffic", "compulsory", "decode", "standard", "traffic", "v1", "v2"),
    "tile": ("TilePlan",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tilewise.model' has no attribute {name!r}")
    value = getattr(import_module(f"tilewise.model.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
