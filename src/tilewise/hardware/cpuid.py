"""What an instruction set and a core's pipelines imply: vector registers, FMAs and loads a cycle."""

from __future__ import annotations

from typing import Any

EXP_OPS = 16
"""Vector operations an exp2 costs: range reduction, a degree-5 polynomial, inserting the exponent (16.7 measured on a
Neoverse N1)."""

_ARM = "Arm Neoverse {} Software Optimization Guide, pipelines and instruction tables"
_INTEL = "Intel 64 and IA-32 Optimization Reference Manual, chapter "

AMX_FLOPS = 1024
"""FLOP of bf16 products a cycle and core: a product of 16 × 32 by 32 × 16 every 16 cycles."""
AMX_SOURCE = _INTEL + "Intel AMX"

_FIGURES = ("simd_bits", "vector_registers", "fma_per_cycle", "fma_latency", "loads_per_cycle", "l2_bytes_per_cycle")
# isa: these figures and their source
_ISAS: dict[str, tuple[int, int, float, int, float, float, str]] = {
    "neon": (128, 32, 2, 4, 2, 16, _ARM.format("N1")),
    "sve": (512, 32, 2, 9, 2, 32, "Fujitsu A64FX Microarchitecture Manual, chapters 2 and 16"),
    "avx2": (256, 16, 2, 4, 2, 32, _INTEL + "Skylake client"),
    "avx512": (512, 32, 2, 4, 2, 32, _INTEL + "Skylake server"),
    "sse2": (128, 16, 1, 4, 1, 16, "Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1"),
    "scalar": (32, 16, 1, 4, 1, 8, "estimate: an unknown machine, taken to have no vectors"),
}

# core: what differs from its instruction set's usual core
_CORES: dict[str, tuple[dict[str, Any], str]] = {
    "neoverse-v1": ({"fma_per_cycle": 4, "loads_per_cycle": 3}, _ARM.format("V1")),
    "neoverse-v2": ({"fma_per_cycle": 4, "loads_per_cycle": 3}, _ARM.format("V2")),
    "apple": (
        {"fma_per_cycle": 4, "loads_per_cycle": 3, "l2_bytes_per_cycle": 32},
        "Apple Silicon CPU Optimization Guide, chapter Microarchitecture",
    ),
    "znver4": (
        {"fma_per_cycle": 1, "loads_per_cycle": 1},
        "AMD Software Optimization Guide for Zen 4, section Floating-Point Unit: 512-bit operations take two passes",
    ),
}

_ARM_PARTS = {
    ("0x41", "0xd0c"): "neoverse-n1",
    ("0x41", "0xd40"): "neoverse-v1",
    ("0x41", "0xd4f"): "neoverse-v2",
    ("0x41", "0xd49"): "neoverse-n2",
}


def core_figures(isa: str, core: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """Pipeline figures of an instruction set, refined for a core where it is known; with sources."""
    *figures, source = _ISAS.get(isa, _ISAS["scalar"])
    values: dict[str, Any] = dict(zip(_FIGURES, figures, strict=True))
    sources = dict.fromkeys(values, source)
    sources["l2_bytes_per_cycle"] = "estimate: sustained L1 refill from L2, half of a line's width a cycle"
    special, special_source = _CORES.get(core, ({}, ""))
    values.update(special)
    sources.update(dict.fromkeys(special, special_source))
    return values, sources


def arm_core(implementer: str, part: str) -> str:
    """Name of an Arm core from /proc/cpuinfo's two numbers, empty if unknown."""
    return _ARM_PARTS.get((implementer.lower(), part.lower()), "")


def isa_of(machine: str, flags: frozenset[str], sve_bits: int = 0) -> str:
    """The instruction set tiles are chosen for.

    SVE counts only from 512 bits on: on cores with 128- and 256-bit SVE the NEON pipes multiply as fast and every
    compiler knows them.
    """
    if machine in ("aarch64", "arm64"):
        return "sve" if "sve" in flags and sve_bits >= 512 else "neon"
    if machine in ("x86_64", "amd64"):
        if "avx512f" in flags:
            return "avx512"
        return "avx2" if {"avx2", "fma"} <= flags else "sse2"
    return "scalar"
