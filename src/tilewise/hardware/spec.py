"""DeviceSpec: what the model needs to know of a machine, and where each figure comes from.

One type describes GPUs and CPUs, because attention asks both the same questions: how many units run tiles side by
side, how many bytes lie next to each of them, what the shared cache holds, how fast memory is, and how many
multiplications and exponentials a second there are. A unit is a streaming multiprocessor (a compute unit at AMD) or
a core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from tilewise.problem import WIDE

KiB, MiB, GiB = 2**10, 2**20, 2**30

MATRIX_UNITS = {"amx": ("amx_tile", "amx_bf16", "avx512_bf16")}
"""Units of a CPU that multiply tiles, and the extensions that kernels for them need."""

_DESCRIPTIVE = {"key", "name", "kind", "vendor", "arch", "isa", "isa_flags", "sources"}


def _frozen(mapping: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    return MappingProxyType(dict(mapping or {}))


@dataclass(frozen=True)
class DeviceSpec:
    """A machine. Bytes, hertz, FLOP/s and bytes/s throughout; 0 means unknown or not applicable.

    `sources` names, for each figure that is set, the document it was taken from, or says that it was `derived:` from
    other figures, is an `estimate:`, or was `probed:` or `measured:` on the live machine.
    """

    key: str
    name: str
    kind: Literal["gpu", "cpu"]
    vendor: str
    arch: str
    """`sm_90`, `gfx942`, `aarch64`, `x86_64`."""
    units: int
    clock_hz: float = 0.0

    sram_bytes: int = 0
    """Per unit: shared memory of an SM (all resident blocks together), or L1 data cache of a core."""
    sram_per_block: int = 0
    """The most one block may take; on a CPU the same as `sram_bytes`."""
    register_bytes: int = 0
    """Per unit: the register file of an SM, or the vector registers of a core."""
    l2_bytes: int = 0
    """Of the whole GPU; of one core on a CPU."""
    l2_bandwidth: float = 0.0
    """Bytes a second from L2 to all units together."""
    l3_bytes: int = 0
    """Shared last level: a CPU's L3, AMD's Infinity Cache."""
    dram_bytes: int = 0
    dram_bandwidth: float = 0.0
    peak: Mapping[str, float] = field(default_factory=_frozen)
    """Dense FLOP/s by dtype, on tensor cores where the dtype has them (`tf32` beside `float32`)."""
    exp_rate: float = 0.0
    """Exponentials a second of the whole device."""

    # GPUs
    warp: int = 0
    max_threads: int = 0
    """Resident threads a unit."""
    max_blocks: int = 0
    """Resident blocks a unit."""
    max_threads_per_block: int = 0
    max_registers: int = 0
    """32-bit registers a thread may have."""
    launch_s: float = 0.0
    """Time from one kernel's end to the next one's start on a busy stream."""

    # links between devices that share a problem, each way
    node_devices: int = 0
    """Devices of one node, joined by `link_bandwidth`; nodes are joined by `network_bandwidth`. 0: all are one node."""
    link_bandwidth: float = 0.0
    """Bytes a second that a device sends to others of its node, and receives from them."""
    link_latency_s: float = 0.0
    network_bandwidth: float = 0.0
    """Bytes a second that a device sends to other nodes, and receives from them."""
    network_latency_s: float = 0.0

    # CPUs
    isa: str = ""
    """`neon`, `sve`, `avx2`, `avx512`, `sse2` or `scalar`: what the register tile is chosen from."""
    isa_flags: tuple[str, ...] = ()
    """Extensions worth knowing: `bf16`, `i8mm`, `avx512_bf16`, `amx_bf16`, …"""
    simd_bits: int = 0
    vector_registers: int = 0
    fma_per_cycle: float = 0.0
    """Vector FMAs a core starts per cycle."""
    fma_latency: int = 0
    """Cycles until an FMA's result can be used."""
    loads_per_cycle: float = 0.0
    """Vector loads a core starts per cycle."""
    l2_bytes_per_cycle: float = 0.0
    """Bytes a core moves between L1 and L2 per cycle."""
    threads: int = 0
    """Threads that share a call, where it is not one for each core."""

    sources: Mapping[str, str] = field(default_factory=_frozen, compare=False)

    def __post_init__(self) -> None:
        for name in ("peak", "sources"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    def __hash__(self) -> int:
        """Cheap, because tiles are remembered by machine: the name and the size tell machines apart well enough."""
        return hash((self.key, self.name, self.arch, self.units))

    # A mapping proxy cannot be pickled or deep-copied; a plain dict can, and __post_init__ freezes it again.
    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return partial(DeviceSpec, **{**values, "peak": dict(self.peak), "sources": dict(self.sources)}), ()

    @property
    def is_gpu(self) -> bool:
        return self.kind == "gpu"

    @property
    def cores(self) -> int:
        return self.units

    @property
    def workers(self) -> int:
        """Threads that share a call on a CPU."""
        return self.threads or self.units

    @property
    def matrix_unit(self) -> str:
        """The unit of a CPU that multiplies tiles, "" if it has none. A live one has it only if this process may use it."""
        return next((unit for unit, flags in MATRIX_UNITS.items() if set(flags) <= set(self.isa_flags)), "")

    @property
    def has_amx(self) -> bool:
        """Has the CPU matrix tiles for bfloat16?"""
        return self.matrix_unit == "amx"

    @property
    def l1d_bytes(self) -> int:
        return self.sram_bytes

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability, None elsewhere."""
        if not self.arch.startswith("sm_"):
            return None
        digits = int(self.arch[3:].rstrip("af"))
        return divmod(digits, 10)

    def lanes(self, itemsize: int = 4) -> int:
        """Elements of `itemsize` bytes in a SIMD register."""
        return max(1, self.simd_bits // (8 * itemsize))

    def flops(self, dtype: str, precision: str = "default") -> float:
        """Dense FLOP/s for matrix products in `dtype`, 0 if unsupported.

        fp32 means fp32 accuracy unless `precision` is `tf32`: on tensor cores it takes three TF32 products for each
        one. Precisions that compute in float64 do so for every dtype.
        """
        if precision in WIDE:
            return float(self.peak.get("float64", 0.0))
        if dtype == "float32" and "tf32" in self.peak:
            tf32 = float(self.peak["tf32"])
            return tf32 if precision == "tf32" else max(tf32 / 3, float(self.peak.get("float32", 0.0)))
        if dtype in self.peak:
            return float(self.peak[dtype])
        if self.kind == "cpu" and dtype in ("float16", "bfloat16"):
            return float(self.peak.get("float32", 0.0))  # widened on the way into the tile, multiplied in fp32
        return 0.0

    def ridge(self, dtype: str, precision: str = "default") -> float:
        """FLOPs a byte at which compute and DRAM take the same time."""
        return self.flops(dtype, precision) / self.dram_bandwidth if self.dram_bandwidth else 0.0

    def figures(self) -> dict[str, Any]:
        """Every figure that is set, by name."""
        return {
            f.name: value
            for f in fields(self)
            if f.name not in _DESCRIPTIVE and (value := getattr(self, f.name)) and value != _frozen()
        }

    def with_figures(self, source: str, **values: Any) -> DeviceSpec:
        """The same machine with some figures replaced, `source` noted beside each."""
        return replace(self, **values, sources={**self.sources, **dict.fromkeys(values, source)})

    def to_dict(self) -> dict[str, Any]:
        described = {name: getattr(self, name) for name in ("key", "name", "kind", "vendor", "arch", "isa")}
        return {
            **described,
            "isa_flags": list(self.isa_flags),
            **{name: dict(v) if isinstance(v, Mapping) else v for name, v in self.figures().items()},
            "sources": dict(self.sources),
        }
