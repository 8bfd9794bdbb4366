"""AMD GPUs and CPUs, each figure with the document it stands in."""

from __future__ import annotations

from tilewise.hardware.cpuid import EXP_OPS, core_figures
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
        sources={
            **dict.fromkeys(("units", "clock_hz", "dram_bytes", "dram_bandwidth", "peak", "l3_bytes"), _MI300X),
            **dict.fromkeys(("sram_bytes", "sram_per_block", "l2_bytes"), _CDNA3),
            "l2_bandwidth": _CDNA3 + ": 2048 B/clk for each of 8 XCDs, × clock",
            **dict.fromkeys(("register_bytes", "warp", "max_threads", "max_blocks"), _CDNA3_ISA),
            **dict.fromkeys(("max_threads_per_block", "max_registers"), _CDNA3_ISA),
            "exp_rate": f"derived: a quarter of the 64-lane vector rate ({_CDNA3_ISA}) × units × clock",
            "launch_s": "estimate: gap between dependent kernels on one stream",
        },
    )


def _cpu(
    key: str,
    name: str,
    arch: str,
    isa: str,
    paper: str,
    *,
    cores: int,
    ghz: float,
    caches: tuple[int, int, int],
    gbps: float,
    flags: tuple[str, ...] = (),
    core: str = "",
    bf16_per_cycle: int = 0,
) -> DeviceSpec:
    """A server CPU; caches are KiB of L1 and L2 and MiB of L3, `core` names the pipelines that apply."""
    l1_kib, l2_kib, l3_mib = caches
    clock = ghz * 1e9
    pipe, pipe_sources = core_figures(isa, core)
    fp32 = cores * clock * pipe["fma_per_cycle"] * pipe["simd_bits"] / 32 * 2
    peak = {"float32": fp32, "float64": fp32 / 2}
    if bf16_per_cycle:
        peak["bfloat16"] = cores * clock * bf16_per_cycle
    return DeviceSpec(
        key=key,
        name=name,
        kind="cpu",
        vendor=name.split()[0],
        arch=arch,
        isa=isa,
        isa_flags=flags,
        units=cores,
        clock_hz=clock,
        sram_bytes=l1_kib * KiB,
        sram_per_block=l1_kib * KiB,
        l2_bytes=l2_kib * KiB,
        l3_bytes=l3_mib * MiB,
        dram_bandwidth=gbps * 1e9,
        peak=peak,
        exp_rate=fp32 / 2 / EXP_OPS,
        register_bytes=pipe["vector_registers"] * pipe["simd_bits"] // 8,
        **pipe,
        sources={
            **dict.fromkeys(
                ("units", "clock_hz", "sram_bytes", "sram_per_block", "l2_bytes", "l3_bytes", "dram_bandwidth"), paper
            ),
            **pipe_sources,
            "register_bytes": "derived: vector registers × SIMD width",
            "peak": "derived: cores × clock × vector FMAs a cycle × lanes × 2"
            + (f"; bfloat16 {bf16_per_cycle} FLOP a cycle and core ({paper})" if bf16_per_cycle else ""),
            "exp_rate": f"derived: vector lanes a second / {EXP_OPS} operations of an exp2 by polynomial",
        },
    )


def cpus() -> list[DeviceSpec]:
    # fmt: off
    return [
        _cpu(
            "altra-q80", "Ampere Altra Q80-30", "aarch64", "neon",
            "Ampere Altra product brief (Q80-30; 8 channels of DDR4-3200); Arm Neoverse N1 TRM for the caches",
            cores=80, ghz=3.0, caches=(64, 1024, 32), gbps=204.8, core="neoverse-n1",
        ),
        _cpu(
            "graviton3", "AWS Graviton3", "aarch64", "neon",
            "AWS re:Invent 2021, session CMP301 (64 cores, 2.6 GHz, 8 channels of DDR5-4800); Neoverse V1 TRM, caches",
            cores=64, ghz=2.6, caches=(64, 1024, 32), gbps=307.2, core="neoverse-v1",
            flags=("bf16", "i8mm", "sve"),
        ),
        _cpu(
            "xeon-8480", "Intel Xeon Platinum 8480+", "x86_64", "avx512",
            "Intel ARK, Xeon Platinum 8480+ (base clock; 8 channels of DDR5-4800); Intel 64 and IA-32 Optimization "
            "Reference Manual, chapters Golden Cove and Intel AMX",
            cores=56, ghz=2.0, caches=(48, 2048, 105), gbps=307.2,
            flags=("amx_bf16", "amx_tile", "avx512_bf16", "avx512f"), bf16_per_cycle=2048,
        ),
        _cpu(
            "epyc-9654", "AMD EPYC 9654", "x86_64", "avx512",
            "AMD EPYC 9004 data sheet (base clock; 12 channels of DDR5-4800); Software Optimization Guide for Zen 4",
            cores=96, ghz=2.4, caches=(32, 1024, 384), gbps=460.8, core="znver4",
            flags=("avx512_bf16", "avx512f"),
        ),
    ]
    # fmt: on


def specs() -> list[DeviceSpec]:
    return [mi300x(), *cpus()]
