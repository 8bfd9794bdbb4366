"""Arithmetic intensity and the roof over it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilewise.hardware.spec import DeviceSpec


def waves(blocks: int, slots: int) -> tuple[int, float]:
    """Rounds a grid takes on `slots` places, and the share of the places it fills."""
    if blocks == 0 or slots == 0:
        return 0, 0.0
    count = -(-blocks // slots)
    return count, blocks / (count * slots)


@dataclass(frozen=True)
class Roofline:
    """Where a problem stands under a device's roof."""

    intensity: float
    ridge: float
    peak: float
    attainable: float

    def seconds(self, flops: float, moved: float) -> float:
        """What the roof allows: `flops` FLOPs at its peak beside `moved` bytes at its bandwidth, whichever takes longer."""
        bandwidth = self.peak / self.ridge if self.ridge else 0.0
        return max(flops / self.peak if self.peak else 0.0, moved / bandwidth if bandwidth else 0.0)

    @property
    def bound(self) -> str:
        return "compute" if self.intensity >= self.ridge else "memory"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bound": self.bound}


def roofline(flops: float, moved: float, dtype: str, spec: DeviceSpec, precision: str = "default") -> Roofline:
    """`flops` FLOPs over `moved` DRAM bytes on `spec`."""
    peak, intensity = spec.flops(dtype, precision), flops / moved if moved else float("inf")
    return Roofline(intensity, spec.ridge(dtype, precision), peak, min(peak, intensity * spec.dram_bandwidth))
