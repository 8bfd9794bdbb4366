"""Reading the live machine: `probe()` for the default device, `probe_cpu()`, `probe_gpu()`.

Nothing is measured, and reading a machine that is there never raises. What the system does not tell is filled in from
the instruction set or the catalogue, and `sources` says so.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any

from tilewise.errors import DeviceError
from tilewise.hardware import amx
from tilewise.hardware.catalogue import closest_gpu
from tilewise.hardware.host import cpu_spec, read_host
from tilewise.hardware.spec import DeviceSpec, MiB

_PROPERTIES = "probed: torch.cuda.get_device_properties"
_ATTRIBUTES = {
    "l2_bytes": "L2_cache_size",
    "sram_bytes": "shared_memory_per_multiprocessor",
    "sram_per_block": "shared_memory_per_block_optin",
    "max_threads": "max_threads_per_multi_processor",
}


def probe(device: str | None = None) -> DeviceSpec:
    """The live device: `"cpu"`, `"cuda"`, `"cuda:1"`; None takes the first GPU if there is one, else the CPU."""
    if device is None:
        return probe_gpu(0) or probe_cpu(_torch_threads())
    if device == "cpu":
        return probe_cpu(_torch_threads())
    kind, _, number = device.partition(":")
    spec = probe_gpu(int(number or 0)) if kind in ("cuda", "hip") and (number or "0").isdigit() else None
    if spec is None:
        raise DeviceError(f"device: {device!r} is not there; need 'cpu' or a visible 'cuda[:i]'")
    return spec


def _torch_threads() -> int:
    """The threads torch uses, 0 where it is not imported: then it is taken to use all cores."""
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else 0


@cache
def probe_cpu(threads: int = 0) -> DeviceSpec:
    """The CPU of this machine, as far as the process may use it, with so many threads a call; 0: one for each core."""
    host = read_host()
    if amx.obstacle() is not None:
        host = replace(host, flags=host.flags - {flag for flag in host.flags if flag.startswith("amx")})
    spec = cpu_spec(host)
    return spec.with_figures("probed: torch.get_num_threads", threads=threads) if threads else spec


@cache
def probe_gpu(index: int = 0) -> DeviceSpec | None:
    """GPU number `index` as torch sees it, completed from the catalogue; None if there is no torch or no such GPU."""
    try:
        import torch

        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            return None
        properties = torch.cuda.get_device_properties(index)
    except Exception:  # a broken driver must look like no GPU
        return None
    return gpu_spec(properties, hip=torch.version.hip is not None)


def gpu_spec(properties: Any, hip: bool = False) -> DeviceSpec:
    """The DeviceSpec of torch's device properties; rates come from the nearest catalogue entry."""
    name = str(properties.name)
    arch = f"sm_{properties.major}{properties.minor}"
    if hip:
        arch = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    known = closest_gpu(name, arch)
    units = int(properties.multi_processor_count)
    probed: dict[str, Any] = {"units": units, "dram_bytes": int(properties.total_memory)}
    for field, attribute in _ATTRIBUTES.items():
        if value := int(getattr(properties, attribute, 0) or 0):
            probed[field] = value
    clock = int(getattr(properties, "clock_rate", 0) or 0) * 1e3
    if known is not None:
        spec = known.with_figures(_PROPERTIES, **probed)
        if units != known.units:
            spec = _scaled(spec, units / known.units, known.key)
        return replace(spec, name=name, arch=arch or spec.arch)
    return _unknown_gpu(name, arch, hip, probed, clock or 1.5e9)


def _scaled(spec: DeviceSpec, ratio: float, of: str) -> DeviceSpec:
    """A relative of a catalogued GPU with another number of units: rates scale with the units."""
    return spec.with_figures(
        f"estimate: {of} scaled by the number of units",
        peak={dtype: rate * ratio for dtype, rate in spec.peak.items()},
        exp_rate=spec.exp_rate * ratio,
        l2_bandwidth=spec.l2_bandwidth * ratio,
    )


def _unknown_gpu(name: str, arch: str, hip: bool, probed: dict[str, Any], clock: float) -> DeviceSpec:
    from tilewise.hardware.nvidia import capability_limits

    limits, sources = capability_limits(arch)
    guess = "estimate: unknown to the catalogue; 1024 tensor FLOP a clock and unit, a byte of memory for each 100"
    peak = probed["units"] * clock * 1024
    values: dict[str, Any] = {
        **limits,
        "clock_hz": clock,
        "l2_bytes": 4 * MiB,
        "peak": {"float16": peak, "bfloat16": peak, "tf32": peak / 2, "float32": peak / 4},
        "exp_rate": probed["units"] * clock * 16,
        "l2_bandwidth": probed["units"] * clock * 32,
        "dram_bandwidth": peak / 100,
        "launch_s": 3e-6,
        **probed,
    }
    sources = {**dict.fromkeys(values, guess), **sources, **dict.fromkeys(probed, _PROPERTIES)}
    vendor = "AMD" if hip else "NVIDIA"
    key = name.lower().replace(" ", "-")
    return DeviceSpec(key=key, name=name, kind="gpu", vendor=vendor, arch=arch, **values, sources=sources)
