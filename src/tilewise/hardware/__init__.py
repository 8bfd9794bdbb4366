"""Machines: what is known of them, what the live one says of itself, and what it really does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewise.hardware.catalogue import catalogue, lookup, names
from tilewise.hardware.probe import probe, probe_cpu, probe_gpu
from tilewise.hardware.spec import DeviceSpec

if TYPE_CHECKING:
    from tilewise.hardware.ceilings import Ceilings as Ceilings
    from tilewise.hardware.ceilings import measure as measure

__all__ = [
    "Ceilings",
    "DeviceSpec",
    "catalogue",
    "device",
    "lookup",
    "measure",
    "names",
    "probe",
    "probe_cpu",
    "probe_gpu",
]


def __getattr__(name: str) -> Any:
    if name in ("Ceilings", "measure"):  # measuring is rare: not loaded before it is asked for
        from tilewise.hardware import ceilings

        return getattr(ceilings, name)
    raise AttributeError(f"module 'tilewise.hardware' has no attribute {name!r}")


def device(which: str | DeviceSpec | None = None) -> DeviceSpec:
    """A machine by description: a DeviceSpec, `"cpu"` or `"cuda[:i]"` for the live one, or a catalogued name."""
    if isinstance(which, DeviceSpec):
        return which
    if which is None or which == "cpu" or which.startswith(("cuda", "hip")):
        return probe(which)
    return lookup(which)
