"""AMD GPUs and CPUs, each figure with the document it stands in."""

from __future__ import annotations

from typing import Any

from tilewise.hardware.host import Host, cpu_spec
from tilewise.hardware.spec import DeviceSpec, GiB, KiB, MiB

_MI300X = "AMD Instinct MI300X data sheet, Specifications"
_CDNA3 = "AMD CDNA 3 Architecture whitepaper, sections Compute Units and Memory Architecture"
_CDNA3_ISA = "AMD Instinct MI300 ISA reference guide, sections LDS and VGPRs; four SIMDs of up to 8 waves a unit"


def mi300x() -> DeviceSpec:
    units, clock = 304, 2.1e9
    return DeviceSpec(
        key="mi300x",
        name="AMD Instinct MI300X",
        kind="gpu",
        vendor="AMD",
        arch="gfx942",
        units=units,
        clock_hz=clock,
        sram_bytes=64 * KiB,
        sram_per_block=64 * KiB,
        register_bytes=512 * KiB,
        l2_bytes=32 * MiB,
        l2_bandwidth=8 * 2048.0 * clock,
        l3_bytes=256 * MiB,
        dram_bytes=192 * GiB,
        dram_bandwidth=5.3e12,
        peak={"float16": 1307.4e12, "bfloat16": 1307.4e12, "tf32": 653.7e12, "float32": 163.4e12, "float64": 163.4e12},
        exp_rate=16.0 * units * clock,
        warp=64,
        max_threads=2048,
        max_blocks=32,
        max_threads_per_block=1024,
        max_registers=512,
        launch_s=5e-6,
        node_devices=8,
        link_bandwidth=448e9,
        link_latency_s=5e-6,
        network_bandwidth=50e9,
        network_latency_s=12e-6,
        sources={
            **dict.fromkeys(("units", "clock_hz", "dram_bytes", "dram_bandwidth", "peak", "l3_bytes"), _MI300X),
            **dict.fromkeys(("sram_bytes", "sram_per_block", "l2_bytes"), _CDNA3),
            "l2_bandwidth": _CDNA3 + ": 2048 B/clk for each of 8 XCDs, × clock",
            **dict.fromkeys(("register_bytes", "warp", "max_threads", "max_blocks"), _CDNA3_ISA),
            **dict.fromkeys(("max_threads_per_block", "max_registers"), _CDNA3_ISA),
            "exp_rate": f"derived: a quarter of the 64-lane vector rate ({_CDNA3_ISA}) × units × clock",
            "launch_s": "estimate: gap between dependent kernels on one stream",
            "link_bandwidth": _MI300X + ": seven Infinity Fabric links, 128 GB/s both ways each",
            "node_devices": _MI300X + ": platforms of eight",
            **dict.fromkeys(("network_bandwidth", "link_latency_s", "network_latency_s"), "estimate: as NVIDIA's, 400 Gb/s"),
        },
    )


def _cpu(key: str, gbps: float, caches: tuple[int, int, int], flags: str = "", **facts: Any) -> DeviceSpec:
    """A server CPU; caches are KiB of L1 and L2 and MiB of L3, `facts` are further fields of `Host`."""
    l1, l2, l3 = caches
    vendor = facts["name"].split()[0]
    host = Host(vendor=vendor, l1d=l1 * KiB, l2=l2 * KiB, l3=l3 * MiB, flags=frozenset(flags.split()), **facts)
    return cpu_spec(host, key).with_figures(host.source, dram_bandwidth=gbps * 1e9)


def cpus() -> list[DeviceSpec]:
    # fmt: off
    altra = _cpu(
        "altra-q80", 204.8, (64, 1024, 32), "asimddp", name="Ampere Altra Q80-30", machine="aarch64", core="neoverse-n1",
        cores=80, clock_hz=3.0e9,
        source="Ampere Altra product brief (Q80-30; 8 channels of DDR4-3200); Arm Neoverse N1 TRM for the caches",
    )
    graviton = _cpu(
        "graviton3", 307.2, (64, 1024, 32), "asimddp bf16 i8mm sve", name="AWS Graviton3", machine="aarch64",
        core="neoverse-v1", cores=64, clock_hz=2.6e9,
        source="AWS re:Invent 2021, session CMP301 (64 cores, 2.6 GHz, 8 channels of DDR5-4800); Neoverse V1 TRM, caches",
    )
    xeon = _cpu(
        "xeon-8480", 307.2, (48, 2048, 105), "amx_bf16 amx_int8 amx_tile avx512_bf16 avx512_vnni avx512f",
        name="Intel Xeon Platinum 8480+", machine="x86_64", cores=56, clock_hz=2.0e9,
        source="Intel ARK, Xeon Platinum 8480+ (base clock; 8 channels of DDR5-4800); Intel 64 and IA-32 Optimization "
        "Reference Manual, chapters Golden Cove and Intel AMX",
    )
    epyc = _cpu(
        "epyc-9654", 460.8, (32, 1024, 384), "avx512_bf16 avx512_vnni avx512f", name="AMD EPYC 9654",
        machine="x86_64", core="znver4", cores=96, clock_hz=2.4e9,
        source="AMD EPYC 9004 data sheet (base clock; 12 channels of DDR5-4800); Software Optimization Guide for Zen 4",
    )
    # fmt: on
    return [altra, graviton, xeon, epyc]


def specs() -> list[DeviceSpec]:
    return [mi300x(), *cpus()]
