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
    softmax: float
    """Clocks of a vector of scores."""
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
        softmax=10.8,
        pack=0.9,
        stream=12.5e9,
        call=8.5e-6,
        origin="Neoverse N1, 2 cores at 2.5 GHz, 2026-11-16: processor time of 58 calls of 1 to 32 heads, 192 to 6000 queries, head "
        "dims 32 to 256; packing from a sweep of rows at d 128, 2048 queries; a matrix unit it has not",
    ),
    "avx512": CpuFit(products=1.2, matrix=0.5, softmax=12.0, pack=1.0, stream=12.5e9, call=6e-6),
}


def cpu_fit(spec: DeviceSpec) -> CpuFit:
    """The constants of a processor: those of its own instruction set, or of the nearest."""
    return CPU.get(spec.isa) or CPU["avx512" if spec.arch == "x86_64" else "neon"]
