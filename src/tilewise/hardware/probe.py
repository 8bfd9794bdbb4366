"""Reading the live machine: `probe()` for the default device, `probe_cpu()`, `probe_gpu()`.

Nothing is measured, and reading a machine that is there never raises. What the system does not tell is filled in from
the instruction set or the catalogue, and `sources` says so.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from tilewise.errors import DeviceError
from tilewise.hardware.catalogue import closest_gpu
from tilewise.hardware.cpuid import EXP_OPS, core_figures, isa_of
from tilewise.hardware.host import Host, read_host
from tilewise.hardware.spec import DeviceSpec, KiB, MiB

_PROPERTIES = "probed: torch.cuda.get_device_properties"
_INTERESTING = (
    "amx_bf16", "amx_int8", "amx_tile", "avx2", "avx512_bf16", "avx512_fp16", "avx512f", "bf16", "f16c", "fma", "fp16",
    "i8mm", "sve", "sve2",
)  # fmt: skip


def probe(device: str | None = None) -> DeviceSpec:
    """The live device: `"cpu"`, `"cuda"`, `"cuda:1"`; None takes the first GPU if there is one, else the CPU."""
    if device is None:
        return probe_gpu(0) or probe_cpu()
    if device == "cpu":
        return probe_cpu()
    kind, _, number = device.partition(":")
    found = probe_gpu(int(number or 0)) if kind in ("cuda", "hip") and (number or "0").isdigit() else None
    if found is None:
        raise DeviceError(f"device: {device!r} is not there; need 'cpu' or a visible 'cuda[:i]'")
    return found


@cache
def probe_cpu() -> DeviceSpec:
    """The CPU of this machine, as far as the process may use it."""
    return cpu_spec(read_host())


def cpu_spec(host: Host) -> DeviceSpec:
    """The DeviceSpec of what was read from a host; gaps are filled from its instruction set."""
    isa = isa_of(host.machine, host.flags, host.sve_bits)
    pipe, sources = core_figures(isa, host.core)
    if isa == "sve":
        pipe["simd_bits"] = host.sve_bits
    told: dict[str, tuple[Any, Any, str]] = {
        "clock_hz": (host.clock_hz, 2.5e9, "a common server clock; the system does not tell its own"),
        "sram_bytes": (host.l1d, 32 * KiB, "the smallest L1 data cache of recent cores"),
        "l2_bytes": (host.l2, 512 * KiB, "a small private L2"),
        "l3_bytes": (host.l3, 0, ""),
        "dram_bytes": (host.memory, 0, ""),
        "units": (host.cores, 1, "one core; the system does not tell"),
    }
    values: dict[str, Any] = {}
    for name, (read, fallback, why) in told.items():
        values[name] = read or fallback
        if values[name]:
            sources[name] = f"probed: {host.origin}" if read else f"estimate: {why}"
    lanes = pipe["simd_bits"] / 32
    fp32 = values["units"] * values["clock_hz"] * pipe["fma_per_cycle"] * lanes * 2
    sources.update(
        sram_per_block=sources["sram_bytes"],
        register_bytes="derived: vector registers × SIMD width",
        peak="derived: cores × clock × vector FMAs a cycle × lanes × 2",
        exp_rate=f"derived: vector lanes a second / {EXP_OPS} operations of an exp2 by polynomial",
        dram_bandwidth="estimate: 16 GB/s a core up to 200 GB/s; hardware.measure('cpu') finds the real figure",
    )
    return DeviceSpec(
        key="cpu",
        name=host.name or f"{host.machine} CPU",
        kind="cpu",
        vendor=host.vendor,
        arch={"arm64": "aarch64", "amd64": "x86_64"}.get(host.machine, host.machine),
        isa=isa,
        isa_flags=tuple(flag for flag in _INTERESTING if flag in host.flags),
        sram_per_block=values["sram_bytes"],
        register_bytes=pipe["vector_registers"] * pipe["simd_bits"] // 8,
        peak={"float32": fp32, "float64": fp32 / 2},
        exp_rate=fp32 / 2 / EXP_OPS,
        dram_bandwidth=min(values["units"] * 16e9, 200e9),
        **values,
        **pipe,
        sources=sources,
    )


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
    for field, attribute in (
        ("l2_bytes", "L2_cache_size"),
        ("sram_bytes", "shared_memory_per_multiprocessor"),
        ("sram_per_block", "shared_memory_per_block_optin"),
        ("max_threads", "max_threads_per_multi_processor"),
    ):
        value = int(getattr(properties, attribute, 0) or 0)
        if value:
            probed[field] = value
    clock = int(getattr(properties, "clock_rate", 0) or 0) * 1e3
    if known is not None:
        spec = known.with_figures(_PROPERTIES, **probed)
        if units != known.units:
            spec = _scaled(spec, units / known.units, known.key)
        return _renamed(spec, name, arch)
    return _unknown_gpu(name, arch, hip, probed, clock or 1.5e9)


def _scaled(spec: DeviceSpec, ratio: float, of: str) -> DeviceSpec:
    """A relative of a catalogued GPU with another number of units: rates scale with the units."""
    return spec.with_figures(
        f"estimate: {of} scaled by the number of units",
        peak={dtype: rate * ratio for dtype, rate in spec.peak.items()},
        exp_rate=spec.exp_rate * ratio,
        l2_bandwidth=spec.l2_bandwidth * ratio,
    )


def _renamed(spec: DeviceSpec, name: str, arch: str) -> DeviceSpec:
    return replace(spec, name=name, arch=arch or spec.arch)


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
