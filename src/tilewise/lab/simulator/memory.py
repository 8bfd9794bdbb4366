"""The two memories of a simulated device: HBM, which counts, and SRAM, which is small."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import PlanError
from tilewise.model.schedules import Traffic

Array = npt.NDArray[Any]
Index = tuple[int | slice, ...]


class Hbm:
    """Named arrays whose every element is counted on its way in and out.

    Values are float64, so that a schedule's result can be compared with the exact one; each array is charged at the
    element size it would have on a device.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.sizes: dict[str, int] = {}
        self.traffic = Traffic()

    def place(self, name: str, array: Array, itemsize: int) -> None:
        """Put an input into memory before the clock starts; not counted."""
        self.arrays[name], self.sizes[name] = array, itemsize

    def reserve(self, name: str, shape: tuple[int, ...], itemsize: int) -> None:
        """Room for an output. It holds NaN, so that reading what was never written shows in the result."""
        self.place(name, np.full(shape, np.nan), itemsize)

    def load(self, name: str, index: Index) -> Array:
        value = np.array(self.arrays[name][index])
        self.traffic.read(name, value.size * self.sizes[name])
        return value

    def store(self, name: str, index: Index, value: Array | float) -> None:
        target = self.arrays[name][index]
        self.arrays[name][index] = value
        self.traffic.write(name, target.size * self.sizes[name])

    def add(self, name: str, index: Index, value: Array) -> None:
        """A reduction performed at the memory's side: the addend travels, the sum does not come back."""
        self.store(name, index, self.arrays[name][index] + value)


@dataclass
class Sram:
    """On-chip memory of one unit: named buffers and the fullest moment."""

    used: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    peak_buffers: dict[str, int] = field(default_factory=dict)

    def hold(self, name: str, elements: int, itemsize: int) -> None:
        """Keep a buffer (again: a buffer that is held already is resized)."""
        self.used[name] = elements * itemsize
        total = sum(self.used.values())
        if total > self.peak:
            self.peak, self.peak_buffers = total, dict(self.used)

    def check(self, capacity: int) -> None:
        """Raise if the fullest moment does not fit `capacity` bytes: only then is it known what a schedule needs."""
        if self.peak > capacity:
            held = ", ".join(f"{buffer} {size:,}" for buffer, size in self.peak_buffers.items())
            raise PlanError(
                f"sram: {self.peak:,} bytes needed, {capacity:,} there ({held}); take a smaller tile or fewer stages"
            )
