"""On-chip bytes, traffic, FLOPs and time of attention, by arithmetic.

Three counts of bytes are kept apart: `compulsory` (each tensor once), tile bytes (what a schedule moves between L2 and
the units: `standard`, `v1`, `v2`, `decode` and the backward passes) and `dram` (what of them L2 lets through).

Names are looked up when first used: choosing a tile needs only a part of this.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.iomodel import backward as backward
    from tilewise.iomodel import seeds as seeds
    from tilewise.iomodel.flops import Work as Work
    from tilewise.iomodel.flops import visible_pairs as visible_pairs
    from tilewise.iomodel.flops import work as work
    from tilewise.iomodel.l2 import dram as dram
    from tilewise.iomodel.onchip import OnChip as OnChip
    from tilewise.iomodel.onchip import kernel as kernel
    from tilewise.iomodel.passes import SCHEDULES as SCHEDULES
    from tilewise.iomodel.passes import compulsory as compulsory
    from tilewise.iomodel.passes import traffic as traffic
    from tilewise.iomodel.roof import Roofline as Roofline
    from tilewise.iomodel.roof import roofline as roofline
    from tilewise.iomodel.schedules import Traffic as Traffic
    from tilewise.iomodel.schedules import decode as decode
    from tilewise.iomodel.schedules import standard as standard
    from tilewise.iomodel.schedules import v1 as v1
    from tilewise.iomodel.schedules import v2 as v2
    from tilewise.iomodel.tile import TilePlan as TilePlan

_HOMES = {
    "TilePlan": "tile",
    "OnChip": "onchip",
    "kernel": "onchip",
    "Traffic": "schedules",
    "compulsory": "passes",
    "standard": "schedules",
    "v1": "schedules",
    "v2": "schedules",
    "decode": "schedules",
    "SCHEDULES": "passes",
    "traffic": "passes",
    "dram": "l2",
    "Work": "flops",
    "work": "flops",
    "visible_pairs": "flops",
    "Roofline": "roof",
    "roofline": "roof",
}
_MODULES = ("backward", "seeds")

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"tilewise.iomodel.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tilewise.iomodel' has no attribute {name!r}")
    value = getattr(import_module(f"tilewise.iomodel.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
