"""What the operating system tells about the CPU: Linux (sysfs, /proc), macOS (sysctl), Windows (kernel32).

Every reader returns what it found and leaves the rest at zero; none raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewise.hardware.cpuid import AMX_FLOPS, AMX_SOURCE, EXP_OPS, arm_core, core_figures, isa_of
from tilewise.hardware.spec import MATRIX_UNITS, DeviceSpec, KiB

MACHINE = platform.machine().lower()
"""Asked for once: torch.compile of some versions fails in `platform` where it follows a call that a graph cannot hold."""
_INTERESTING = (
    "amx_bf16", "amx_int8", "amx_tile", "asimddp", "avx2", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512f", "avx_vnni",
    "bf16", "f16c", "fma", "fp16", "i8mm", "sve", "sve2",
)  # fmt: skip


@dataclass(frozen=True)
class Host:
    """Raw facts; 0 or empty where the system is silent."""

    machine: str = MACHINE
    source: str = "probed: the operating system"
    name: str = ""
    vendor: str = ""
    core: str = ""
    cores: int = 0
    clock_hz: float = 0.0
    l1d: int = 0
    l2: int = 0
    l3: int = 0
    memory: int = 0
    flags: frozenset[str] = frozenset()
    sve_bits: int = 0


def read_host() -> Host:
    """The host this process runs on."""
    reader = {"linux": _linux, "darwin": _macos, "win32": _windows}.get(sys.platform)
    host = Host(cores=os.cpu_count() or 1)
    if reader is not None:
        with contextlib.suppress(Exception):
            host = reader(host)
    return replace(host, flags=host.flags or _llvm_flags())


# DeviceSpec: the field of Host, what is taken where the system is silent, and why
_FALLBACKS: dict[str, tuple[str, Any, str]] = {
    "clock_hz": ("clock_hz", 2.5e9, "a common server clock; the system does not tell its own"),
    "sram_bytes": ("l1d", 32 * KiB, "the smallest L1 data cache of recent cores"),
    "l2_bytes": ("l2", 512 * KiB, "a small private L2"),
    "l3_bytes": ("l3", 0, ""),
    "dram_bytes": ("memory", 0, ""),
    "units": ("cores", 1, "one core; the system does not tell"),
}

GLOO_SOURCE = "measured: gloo between two processes on a Neoverse N1, messages of 16 MB each way"


def cpu_spec(host: Host, key: str = "cpu") -> DeviceSpec:
    """The DeviceSpec of a host; gaps are filled from its instruction set."""
    isa = isa_of(host.machine, host.flags, host.sve_bits)
    pipe, sources = core_figures(isa, host.core)
    if isa == "sve":
        pipe["simd_bits"] = host.sve_bits
    values: dict[str, Any] = {}
    for name, (field_name, fallback, why) in _FALLBACKS.items():
        known = getattr(host, field_name)
        values[name] = known or fallback
        if values[name]:
            sources[name] = host.source if known else f"estimate: {why}"
    lanes = pipe["simd_bits"] / 32
    fp32 = values["units"] * values["clock_hz"] * pipe["fma_per_cycle"] * lanes * 2
    peak = {"float32": fp32, "float64": fp32 / 2}
    sources.update(
        sram_per_block=sources["sram_bytes"],
        register_bytes="derived: vector registers × SIMD width",
        peak="derived: cores × clock × vector FMAs a cycle × lanes × 2",
        exp_rate=f"derived: vector lanes a second / {EXP_OPS} operations of an exp2 by polynomial",
        link_bandwidth=GLOO_SOURCE,
        link_latency_s=GLOO_SOURCE,
        dram_bandwidth="estimate: 16 GB/s a core up to 200 GB/s; hardware.measure('cpu') finds the real figure",
    )
    if set(MATRIX_UNITS["amx"]) <= host.flags:
        peak["bfloat16"] = values["units"] * values["clock_hz"] * AMX_FLOPS
        sources["peak"] += f"; bfloat16 {AMX_FLOPS} FLOP a cycle and core ({AMX_SOURCE})"
    return DeviceSpec(
        key=key,
        name=host.name or f"{host.machine} CPU",
        kind="cpu",
        vendor=host.vendor,
        arch={"arm64": "aarch64", "amd64": "x86_64"}.get(host.machine, host.machine),
        isa=isa,
        isa_flags=tuple(flag for flag in _INTERESTING if flag in host.flags),
        sram_per_block=values["sram_bytes"],
        register_bytes=pipe["vector_registers"] * pipe["simd_bits"] // 8,
        peak=peak,
        exp_rate=fp32 / 2 / EXP_OPS,
        dram_bandwidth=min(values["units"] * 16e9, 200e9),
        link_bandwidth=0.40e9,
        link_latency_s=200e-6,
        **values,
        **pipe,
        sources=sources,
    )


def parse_size(text: str) -> int:
    """`64K`, `1024K`, `32M` in bytes."""
    text = text.strip()
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper(), 1)
    digits = text.rstrip("KMGkmg")
    return int(digits) * scale if digits.isdigit() else 0


def parse_cpuinfo(text: str) -> dict[str, str]:
    """The first processor's fields of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower(), value.strip())
    return fields


def parse_cpu_list(text: str) -> set[int]:
    """`0-3,8` as {0, 1, 2, 3, 8}."""
    result: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            result |= set(range(int(first), int(last or first) + 1))
    return result


def _linux(host: Host) -> Host:
    return linux_host(host, Path("/"), set(os.sched_getaffinity(0)))


def linux_host(host: Host, root: Path, affinity: set[int]) -> Host:
    """A Linux host below `root` (for tests, a copy of the files that matter)."""
    info = parse_cpuinfo(_text(root / "proc/cpuinfo"))
    sizes: dict[str, int] = {}
    system = root / "sys/devices/system/cpu"
    for index in sorted((system / "cpu0/cache").glob("index*")):
        level, kind = _text(index / "level").strip(), _text(index / "type").strip()
        if kind != "Instruction":
            sizes[level] = parse_size(_text(index / "size"))
    flags = frozenset((info.get("flags") or info.get("features") or "").replace("fphp", "fphp fp16").split())
    khz = _text(system / "cpu0/cpufreq/cpuinfo_max_freq").strip()
    mhz = info.get("cpu mhz", "")
    core = arm_core(info.get("cpu implementer", ""), info.get("cpu part", ""))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return replace(
        host,
        source="probed: /sys/devices/system/cpu and /proc/cpuinfo",
        name=info.get("model name") or core.replace("-", " ").title(),
        vendor={"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}.get(info.get("vendor_id", ""), "Arm" if core else ""),
        core=core or _x86_core(info),
        cores=_linux_cores(system, affinity, _text(root / "sys/fs/cgroup/cpu.max")),
        clock_hz=float(khz) * 1e3 if khz.isdigit() else float(mhz) * 1e6 if mhz else 0.0,
        l1d=sizes.get("1", 0),
        l2=sizes.get("2", 0),
        l3=sizes.get("3", 0),
        memory=pages,
        flags=flags,
        sve_bits=_sve_bits() if "sve" in flags else 0,
    )


def _x86_core(info: dict[str, str]) -> str:
    """Zen 4 is family 25 with models from 0x10 on; it alone halves 512-bit operations."""
    zen3_or_4 = info.get("vendor_id") == "AuthenticAMD" and info.get("cpu family") == "25"
    return "znver4" if zen3_or_4 and "avx512f" in info.get("flags", "") else ""


def _linux_cores(system: Path, affinity: set[int], quota: str) -> int:
    """Physical cores the process may use: one per group of hyper-threads, no more than the cgroup's quota."""
    groups = set()
    for cpu in affinity:
        siblings = parse_cpu_list(_text(system / f"cpu{cpu}/topology/thread_siblings_list")) or {cpu}
        groups.add(min(siblings))
    cores = max(1, len(groups))
    limit = quota.split()
    if len(limit) == 2 and limit[0].isdigit() and limit[1].isdigit():
        cores = min(cores, max(1, round(int(limit[0]) / int(limit[1]))))
    return cores


def _sve_bits() -> int:
    """The vector length this process runs with (prctl PR_SVE_GET_VL); 128 if the kernel does not say."""
    with contextlib.suppress(Exception):
        length = int(ctypes.CDLL(None).prctl(51, 0, 0, 0, 0))
        if length > 0:
            return 8 * (length & 0xFFFF)
    return 128


def _macos(host: Host) -> Host:
    def number(*names: str) -> int:
        values = (_sysctl(name) for name in names)
        return next((int(value) for value in values if value.isdigit() and int(value)), 0)

    brand = _sysctl("machdep.cpu.brand_string")
    features = {
        "asimddp": "arm.FEAT_DotProd", "bf16": "arm.FEAT_BF16", "i8mm": "arm.FEAT_I8MM",
        "avx2": "avx2_0", "avx512_vnni": "avx512vnni", "avx512f": "avx512f", "fma": "fma"
    }  # fmt: skip
    flags = {flag for flag, name in features.items() if _sysctl(f"hw.optional.{name}") == "1"}
    apple = brand.startswith("Apple")
    return replace(
        host,
        source="probed: sysctl",
        name=brand,
        vendor="Apple" if apple else "Intel",
        core="apple" if apple else "",
        cores=number("hw.perflevel0.physicalcpu", "hw.physicalcpu") or host.cores,
        clock_hz=float(number("hw.cpufrequency_max")),
        l1d=number("hw.perflevel0.l1dcachesize", "hw.l1dcachesize"),
        l2=number("hw.perflevel0.l2cachesize", "hw.l2cachesize") // (number("hw.perflevel0.cpusperl2") or 1),
        l3=number("hw.l3cachesize"),
        memory=number("hw.memsize"),
        flags=frozenset(flags | ({"asimd", "fp16"} if apple else set())),
    )


def _sysctl(name: str) -> str:
    import subprocess

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


class _Relation(ctypes.Structure):
    """SYSTEM_LOGICAL_PROCESSOR_INFORMATION; `level`, `size` and `kind` are those of its cache descriptor."""

    _fields_ = [
        ("mask", ctypes.c_size_t), ("relationship", ctypes.c_int), ("level", ctypes.c_ubyte), ("ways", ctypes.c_ubyte),
        ("line", ctypes.c_ushort), ("size", ctypes.c_uint32), ("kind", ctypes.c_int), ("pad", ctypes.c_ulonglong),
    ]  # fmt: skip


def _windows(host: Host) -> Host:
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
    length = ctypes.c_uint32(0)
    kernel.GetLogicalProcessorInformation(None, ctypes.byref(length))
    table = (_Relation * (length.value // ctypes.sizeof(_Relation)))()
    kernel.GetLogicalProcessorInformation(table, ctypes.byref(length))
    # relationship 0 is a core, 2 a cache; cache kind 1 holds instructions only
    caches = {entry.level: entry.size for entry in table if entry.relationship == 2 and entry.kind != 1}
    features = {"avx2": 40, "avx512f": 41, "fma": 40}  # IsProcessorFeaturePresent; every AVX2 machine fuses
    flags = frozenset(flag for flag, number in features.items() if kernel.IsProcessorFeaturePresent(number))
    return replace(
        host,
        source="probed: kernel32",
        name=platform.processor(),
        vendor="Intel" if "Intel" in platform.processor() else "AMD" if "AMD" in platform.processor() else "",
        cores=sum(entry.relationship == 0 for entry in table) or host.cores,
        l1d=caches.get(1, 0),
        l2=caches.get(2, 0),
        l3=caches.get(3, 0),
        flags=flags,
    )


def _llvm_flags() -> frozenset[str]:
    """The host's features as LLVM names them, where llvmlite is installed."""
    with contextlib.suppress(Exception):
        binding: Any = __import__("llvmlite.binding", fromlist=["binding"])
        features = binding.get_host_cpu_features()
        return frozenset(name.replace("-", "_") for name, on in features.items() if on)
    return frozenset()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
