"""Machines: what is known of them, what the live one says of itself, and what it really does."""

from __future__ import annotations

from tilewise.errors import DeviceError
from tilewise.hardware.catalogue import catalogue, lookup, names
from tilewise.hardware.measure import Ceilings, measure
from tilewise.hardware.probe import probe, probe_cpu, probe_gpu
from tilewise.hardware.spec import DeviceSpec

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


def device(which: str | DeviceSpec | None = None) -> DeviceSpec:
    """A machine by description: a DeviceSpec, `"cpu"` or `"cuda[:i]"` for the live one, or a catalogued name."""
    if isinstance(which, DeviceSpec):
        return which
    if which is None:
        return probe()
    if which == "cpu":
        return probe_cpu()
    if which.startswith(("cuda", "hip")):
        number = which.partition(":")[2] or "0"
        found = probe_gpu(int(number)) if number.isdigit() else None
        if found is None:
            known = ", ".join(names())
            raise DeviceError(f"device: {which!r} is not there; name a catalogued GPU instead, one of {known}")
        return found
    return lookup(which)
