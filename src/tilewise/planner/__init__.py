"""From a problem and a machine to tiles, with reasons."""

from __future__ import annotations

from tilewise.iomodel.tile import TilePlan
from tilewise.planner.cpu import CpuTile, cpu_tile
from tilewise.planner.gpu import gpu_tile
from tilewise.planner.plan import Alternative, Plan, plan

__all__ = ["Alternative", "CpuTile", "Plan", "TilePlan", "cpu_tile", "gpu_tile", "plan"]
