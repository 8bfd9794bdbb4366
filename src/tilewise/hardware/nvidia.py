"""NVIDIA GPUs, each figure with the document it stands in.

Rates are dense (without sparsity) and, on GeForce cards, with fp32 accumulation: attention accumulates in fp32. Limits
per SM follow from the compute capability and are written once, in `_LIMITS`.
"""

from __future__ import annotations

from typing import Any

from tilewise.hardware.spec import DeviceSpec, GiB, KiB, MiB

_GUIDE = "CUDA C++ Programming Guide, Compute Capabilities, table Technical Specifications per Compute Capability"
_MUFU = (
    "derived: 16 results a clock and SM for 32-bit ex2 (CUDA C++ Programming Guide, table Throughput of Native "
    "Arithmetic Instructions) × SMs × clock"
)
_LAUNCH = "estimate: gap between dependent kernels on one stream, a few microseconds on every recent GPU"
_L2_A100 = "NVIDIA A100 whitepaper v1.0, section A100 L2 Cache: 5120 B/clk against V100's 2048 B/clk, × clock"
_L2_PORT = "estimate: 64 B a clock and SM (L2 to L1 port) × SMs × clock, halved for contention; no figure is published"
_L2_HOPPER = "estimate: A100's 5120 B/clk (A100 whitepaper, section A100 L2 Cache) × clock; no figure is published"
_L2_BLACKWELL = "estimate: two dies with A100's 5120 B/clk each (A100 whitepaper, section A100 L2 Cache) × clock"
_CLOCK = "derived: the clock at which the published 16-bit tensor rate is reached, peak / (SMs × {} FLOP/clk)"

# capability: bytes a clock from L2, with the source
_L2_RATES = {
    "sm_70": (2048.0, _L2_A100),
    "sm_80": (5120.0, _L2_A100),
    "sm_90": (5120.0, _L2_HOPPER),
    "sm_100": (2 * 5120.0, _L2_BLACKWELL),
}
_FLOP_PER_CLOCK = {"sm_90": 4096, "sm_100": 8192}  # of an SM, in 16 bits

# capability: shared memory per SM and per block (KiB), threads and blocks resident per SM
_LIMITS = {
    "sm_70": (96, 96, 2048, 32),
    "sm_80": (164, 163, 2048, 32),
    "sm_86": (100, 99, 1536, 16),
    "sm_89": (100, 99, 1536, 24),
    "sm_90": (228, 227, 2048, 32),
    "sm_100": (228, 227, 2048, 32),
    "sm_120": (100, 99, 1536, 24),
}


_LATENCY = "estimate: a message of a few bytes between two devices, NCCL's own work included"
_PCIE = "PCI Express Base Specification 4.0: 16 lanes of 16 GT/s, each way, less the encoding"
# key: GB/s each way within a node and per GPU between nodes, and where they stand
_LINKS = {
    "v100": (150.0, 12.5, "NVIDIA DGX-1 with Tesla V100 whitepaper: NVLink, 300 GB/s both ways; four 100 Gb/s adapters"),
    "a100": (300.0, 25.0, "NVIDIA DGX A100 datasheet: NVLink, 600 GB/s both ways; a 200 Gb/s adapter for each GPU"),
    "h100": (450.0, 50.0, "NVIDIA DGX H100 datasheet: NVLink, 900 GB/s both ways; a 400 Gb/s adapter for each GPU"),
    "h200": (450.0, 50.0, "NVIDIA DGX H200 datasheet: NVLink, 900 GB/s both ways; a 400 Gb/s adapter for each GPU"),
    "b200": (900.0, 50.0, "NVIDIA DGX B200 datasheet: NVLink, 1.8 TB/s both ways; a 400 Gb/s adapter for each GPU"),
}


def _links(key: str) -> tuple[dict[str, Any], dict[str, str]]:
    """How GPUs of a kind are joined; those without NVLink by PCIe."""
    own, network, source = _LINKS.get(key.removesuffix("-40").removesuffix("-80"), (31.5, 12.5, _PCIE))
    values = {
        "node_devices": 8,
        "link_bandwidth": own * 1e9,
        "link_latency_s": 5e-6,
        "network_bandwidth": network * 1e9,
        "network_latency_s": 12e-6,
    }
    return values, {**dict.fromkeys(values, source), "link_latency_s": _LATENCY, "network_latency_s": _LATENCY}


def capability_limits(arch: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What the compute capability alone fixes, with sources; an unknown capability gets the smallest recent limits."""
    shared, per_block, threads, blocks = _LIMITS.get(arch, _LIMITS["sm_120"])
    values: dict[str, Any] = {
        "sram_bytes": shared * KiB,
        "sram_per_block": per_block * KiB,
        "register_bytes": 256 * KiB,
        "warp": 32,
        "max_threads": threads,
        "max_blocks": blocks,
        "max_threads_per_block": 1024,
        "max_registers": 255,
    }
    return values, dict.fromkeys(values, _GUIDE)


def _gpu(
    key: str, name: str, arch: str, paper: str,
    *, sms: int, l2_mib: float, gib: float, gbps: float, tflops: dict[str, float], mhz: float = 0,
) -> DeviceSpec:  # fmt: skip
    """A GPU; without `mhz` its clock is the one at which the published 16-bit tensor rate is reached."""
    flop = _FLOP_PER_CLOCK.get(arch, 0)
    clock = (mhz or tflops["float16"] * 1e6 / (sms * flop)) * 1e6
    limits, limit_sources = capability_limits(arch)
    links, link_sources = _links(key)
    l2_rate, l2_source = _L2_RATES.get(arch, (32.0 * sms, _L2_PORT))
    return DeviceSpec(
        key=key,
        name=name,
        kind="gpu",
        vendor="NVIDIA",
        arch=arch,
        units=sms,
        clock_hz=clock,
        l2_bytes=int(l2_mib * MiB),
        l2_bandwidth=l2_rate * clock,
        dram_bytes=int(gib * GiB),
        dram_bandwidth=gbps * 1e9,
        peak={dtype: rate * 1e12 for dtype, rate in tflops.items()},
        exp_rate=16.0 * sms * clock,
        launch_s=3e-6,
        **limits,
        **links,
        sources={
            **dict.fromkeys(("units", "clock_hz", "l2_bytes", "dram_bytes", "dram_bandwidth", "peak"), paper),
            "l2_bandwidth": l2_source,
            "exp_rate": _MUFU,
            "launch_s": _LAUNCH,
            **limit_sources,
            **link_sources,
            **({} if mhz else {"clock_hz": _CLOCK.format(flop)}),
        },
    )


def _rates(half: float, tf32: float, fp32: float, fp64: float = 0.0) -> dict[str, float]:
    """TFLOP/s of a GPU whose tensor cores know bfloat16 and TF32."""
    rates = {"float16": half, "bfloat16": half, "tf32": tf32, "float32": fp32, "float64": fp64}
    return {dtype: rate for dtype, rate in rates.items() if rate}


_V100 = "NVIDIA Tesla V100 whitepaper WP-08608, table Comparison of NVIDIA Tesla GPUs; V100 datasheet (32 GB SXM2)"
_A100 = "NVIDIA A100 whitepaper v1.0, table Comparison of NVIDIA Data Center GPUs"
_A100_80 = _A100 + "; A100 80GB datasheet, SXM column"
_A10 = "NVIDIA A10 datasheet, Specifications; GA102 whitepaper, table for the chip's caches"
_L4 = "NVIDIA L4 datasheet, Technical Specifications (half of those with sparsity); Ada whitepaper for AD104's caches"
_L40S = "NVIDIA L40S datasheet, Technical Specifications; Ada whitepaper for AD102's caches"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A, GeForce RTX 3090"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A, GeForce RTX 4090"
_GB202 = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A, GeForce RTX 5090"
_H100 = "NVIDIA H100 whitepaper v1.04, table Comparison of A100 and H100"
_H200 = "NVIDIA H200 datasheet, Technical Specifications, SXM column; chip as H100 SXM (" + _H100 + "); L2 as its driver tells"
_B200 = "NVIDIA HGX B200 and DGX B200 datasheets, per GPU; Blackwell Tuning Guide for the caches"


def specs() -> list[DeviceSpec]:
    ampere, hopper = _rates(312.0, 156.0, 19.5, 19.5), _rates(989.4, 494.7, 66.9, 66.9)
    # fmt: off
    return [
        _gpu("v100", "NVIDIA V100 SXM2 32GB", "sm_70", _V100, sms=80, mhz=1530, l2_mib=6, gib=32, gbps=900,
             tflops={"float16": 125.0, "float32": 15.7, "float64": 7.8}),
        _gpu("a100-40", "NVIDIA A100 SXM4 40GB", "sm_80", _A100, sms=108, mhz=1410, l2_mib=40, gib=40, gbps=1555,
             tflops=ampere),
        _gpu("a100-80", "NVIDIA A100 SXM4 80GB", "sm_80", _A100_80, sms=108, mhz=1410, l2_mib=40, gib=80, gbps=2039,
             tflops=ampere),
        _gpu("a10", "NVIDIA A10", "sm_86", _A10, sms=72, mhz=1695, l2_mib=6, gib=24, gbps=600,
             tflops=_rates(125.0, 62.5, 31.2)),
        _gpu("l4", "NVIDIA L4", "sm_89", _L4, sms=58, mhz=2040, l2_mib=48, gib=24, gbps=300,
             tflops=_rates(121.0, 60.0, 30.3)),
        _gpu("l40s", "NVIDIA L40S", "sm_89", _L40S, sms=142, mhz=2520, l2_mib=96, gib=48, gbps=864,
             tflops=_rates(362.05, 183.0, 91.6)),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", "sm_86", _GA102, sms=82, mhz=1695, l2_mib=6, gib=24, gbps=936,
             tflops=_rates(71.0, 35.6, 35.6)),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", "sm_89", _ADA, sms=128, mhz=2520, l2_mib=72, gib=24, gbps=1008,
             tflops=_rates(165.2, 82.6, 82.6)),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", "sm_120", _GB202, sms=170, mhz=2407, l2_mib=96, gib=32, gbps=1792,
             tflops=_rates(209.5, 104.8, 104.8)),
        _gpu("h100", "NVIDIA H100 SXM5 80GB", "sm_90", _H100, sms=132, l2_mib=50, gib=80, gbps=3350, tflops=hopper),
        _gpu("h100-pcie", "NVIDIA H100 PCIe 80GB", "sm_90", _H100, sms=114, l2_mib=50, gib=80, gbps=2000,
             tflops=_rates(756.0, 378.0, 51.2, 51.2)),
        _gpu("h200", "NVIDIA H200 SXM 141GB", "sm_90", _H200, sms=132, l2_mib=60, gib=131.3, gbps=4800, tflops=hopper),
        _gpu("b200", "NVIDIA B200 SXM 180GB", "sm_100", _B200, sms=148, l2_mib=126, gib=167.6, gbps=8000,
             tflops=_rates(2250.0, 1125.0, 75.0, 37.0)),
    ]
    # fmt: on
