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
        origin="Neoverse N1, 2 cores at 2.5 GHz, 2026-11-16: processor time of 58 calls of 1 to 32 heads, 192 to 6000 queries, head "
        "dims 32 to 256; packing from a sweep of rows at d 128, 2048 queries; a matrix unit it has not",
    ),
    "avx512": CpuFit(
        products=1.1,
        matrix=0.28,
        together=1.2,
        pack=0.18,
        stream=20e9,
        call=8e-6,
        origin="Xeon with AVX-512 and AMX, 16 virtual cores, nominally 2.1 GHz, 2026-11-16: medians of 76 calls with 2 and with 16 "
        "threads, 2 to 32 heads, 192 to 6000 queries, head dims 32 to 256, decoding 2000 to 30000 keys; a call from those of 8 to "
        "64 queries",
    ),
}


def cpu_fit(spec: DeviceSpec) -> CpuFit:
    """The constants of a processor: those of its own instruction set, or of the nearest."""
    return CPU.get(spec.isa) or CPU["avx512" if spec.arch == "x86_64" else "neon"]
