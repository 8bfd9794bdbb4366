"""Constants fitted to measured times: at most six a device, on other shapes than the benchmarks it is judged by."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.hardware.spec import DeviceSpec


@dataclass(frozen=True)
class CpuFit:
    """What a CPU's figures do not tell. Clocks are those of `DeviceSpec.clock_hz`."""

    products: float
    """The part of the nominal FMA peak that the register loops reach; above 1 where a core runs faster than its nominal clock."""
    matrix: float
    """The same of the matrix unit's peak."""
    together: float
    """How much longer a core takes when all of them work: hyperthreads share its pipes, and its clock is lower."""
    pack: float
    """Clocks of an element that is packed."""
    stream: float
    """Bytes a second that one core reads when it decodes."""
    call: float
    """Seconds of a call beside its kernel."""
    origin: str = ""
    """How, when and on which shapes it was fitted."""


CPU: dict[str, CpuFit] = {
    "neon": CpuFit(
        products=1.0,
        matrix=1.0,
        together=1.0,
        pack=0.9,
        stream=12.5e9,
        call=8.5e-6,
        origin="Neoverse N1, 2 cores at 2.5 GHz, 2026-11-16: processor time of 58 calls of 1 to 32 heads, 192 to 6000 "
        "queries, head dims 32 to 256; packing from a sweep of rows at d 128, 2048 queries; a matrix unit it has not",
    ),
    "avx512": CpuFit(
        products=1.1,
        matrix=0.28,
        together=1.2,
        pack=0.18,
        stream=20e9,
        call=8e-6,
        origin="Xeon with AVX-512 and AMX, 16 virtual cores, nominally 2.1 GHz, 2026-11-16: medians of 76 calls with 2 "
        "and with 16 threads, 2 to 32 heads, 192 to 6000 queries, head dims 32 to 256, decoding 2000 to 30000 keys; a call "
        "from those of 8 to 64 queries",
    ),
}


def cpu_fit(spec: DeviceSpec) -> CpuFit:
    """The constants of a processor: those of its own instruction set, or of the nearest."""
    return CPU.get(spec.isa) or CPU["avx512" if spec.arch == "x86_64" else "neon"]


@dataclass(frozen=True)
class GpuFit:
    """What a GPU's figures do not tell of persistent kernels. Clocks are those of `DeviceSpec.clock_hz`."""

    softmax: float
    """The part of the softmax that no product hides."""
    step: float
    """Clocks that a warpgroup waits in a step."""
    tile: float
    """Times that a work tile of 128 × 128 waits for a load."""
    origin: str = ""
    """How, when and on which shapes it was fitted."""


GPU: dict[str, GpuFit] = {
    "h200": GpuFit(
        softmax=0.36,
        step=718.0,
        tile=3.49,
        origin="NVIDIA H200, 2026-11-16: least squares of relative errors over 52 calls, forward and backward, of 640, 1024, "
        "1536, 3072, 4096, 6144 and 12288 tokens, 6 to 32 heads of 64, 128 and 256, full, causal, GQA 24/8 and a window of 1024; "
        "backwards under 250 µs, which wait for the host, are left out",
    ),
}


def gpu_fit(spec: DeviceSpec) -> GpuFit:
    """The constants of a GPU: its own, or those of the one that was measured."""
    return GPU.get(spec.key) or GPU["h200"]
