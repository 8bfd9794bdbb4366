"""From a problem and a machine to tiles, with reasons."""

from __future__ import annotations

from tilewise.iomodel.tile import TilePlan
from tilewise.planner.cpu import CpuTile, cpu_tile
from tilewise.planner.gpu import gpu_tile

__all__ = ["CpuTile", "TilePlan", "cpu_tile", "gpu_tile"]
