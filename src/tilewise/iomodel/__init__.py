"""On-chip bytes, traffic, FLOPs and time of attention, by arithmetic."""

from __future__ import annotations

from tilewise.iomodel.tile import TilePlan

__all__ = ["TilePlan"]
