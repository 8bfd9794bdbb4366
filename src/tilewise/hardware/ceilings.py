"""`measure()`: a machine's real ceilings (matrix products, copies, reads, exponentials), measured once and cached.

The figures are what the library the user has installed reaches on the machine as it is, so a roofline against them says
how much is left to gain in practice rather than on a datasheet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilewise.errors import DeviceError
from tilewise.hardware.cache import cache_root, load_json, store_json
from tilewise.hardware.probe import probe_cpu, probe_gpu
from tilewise.hardware.spec import DeviceSpec, MiB
from tilewise.hardware.timers import median_seconds

_VERSION = 1


@dataclass(frozen=True)
class Ceilings:
    """Measured rates: FLOP/s by dtype, bytes/s and exponentials/s."""

    device: str
    date: str
    software: str
    gemm: Mapping[str, float] = field(default_factory=dict)
    copy: float = 0.0
    """Bytes read plus bytes written a second."""
    read: float = 0.0
    exp: float = 0.0

    def apply(self, spec: DeviceSpec) -> DeviceSpec:
        """`spec` with its peaks and rates replaced by what was measured."""
        source = f"measured: {self.date}, {self.software}"
        values: dict[str, Any] = {"peak": {**spec.peak, **self.gemm}}
        if self.read:
            values["dram_bandwidth"] = max(self.read, self.copy)
        if self.exp and not spec.is_gpu:  # on a GPU a plain exp kernel is bound by memory, not by its exponential units
            values["exp_rate"] = self.exp
        return spec.with_figures(source, **values)


def measure(
    device: str = "cpu", *, refresh: bool = False, quick: bool = False, cache_dir: Path | None = None
) -> Ceilings:
    """The ceilings of the live `device` (`"cpu"`, `"cuda[:i]"`), from the cache unless `refresh`; `quick` takes small
    sizes."""
    spec = probe_cpu() if device == "cpu" else probe_gpu(int(device.partition(":")[2] or 0))
    if spec is None or (device != "cpu" and not device.startswith("cuda")):
        raise DeviceError(f"device: cannot measure {device!r}, only the live 'cpu' or a visible 'cuda[:i]'")
    bench = _Bench(device)
    identity = {"version": _VERSION, "name": spec.name, "units": spec.units, "software": bench.software, "quick": quick}
    path = _path(spec, cache_dir)
    if not refresh:
        stored = load_json(path, identity)
        if stored is not None:
            return Ceilings(**stored)
    ceilings = _run(spec, bench, quick)
    store_json(path, identity, asdict(ceilings))
    return ceilings


def _path(spec: DeviceSpec, cache_dir: Path | None) -> Path:
    plain = "".join(ch if ch.isalnum() else "-" for ch in f"{spec.name}-{spec.units}".lower())
    return (cache_dir or cache_root()) / f"ceilings-{plain}.json"


class _Bench:
    """A CPU or GPU through torch."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, device
        self.software = f"torch {torch.__version__}"
        self.dtypes = ("float32", "float64") if device == "cpu" else ("float16", "bfloat16", "tf32", "float32")

    def seconds(self, call: Callable[[], Any], rounds: int) -> float:
        return median_seconds(call, self.device, rounds)[0]

    def _randn(self, *shape: int, dtype: str = "float32") -> Any:
        return self.torch.randn(*shape, device=self.device).to(getattr(self.torch, dtype))

    def gemm(self, n: int, dtype: str) -> Callable[[], Any]:
        a = self._randn(n, n, dtype="float32" if dtype == "tf32" else dtype)
        out = self.torch.empty_like(a)

        def call() -> None:
            matmul = self.torch.backends.cuda.matmul
            before = matmul.allow_tf32
            matmul.allow_tf32 = dtype == "tf32"
            try:
                self.torch.mm(a, a, out=out)
            finally:
                matmul.allow_tf32 = before

        return call

    def copy(self, size: int) -> Callable[[], Any]:
        a = self._randn(size // 4)
        b = self.torch.empty_like(a)
        return lambda: b.copy_(a)

    def read(self, size: int) -> Callable[[], Any]:
        a = self._randn(size // 4)
        return lambda: a.sum()

    def exp(self, count: int) -> Callable[[], Any]:
        a = self._randn(count)
        out = self.torch.empty_like(a)
        return lambda: self.torch.exp(a, out=out)


def _run(spec: DeviceSpec, bench: _Bench, quick: bool) -> Ceilings:
    gpu = spec.is_gpu
    rounds = 3 if quick else 15
    n = (2048 if quick else 8192) if gpu else (256 if quick else 1024)
    # copies and reads must not come out of the last cache
    large = max(4 * max(spec.l2_bytes, spec.l3_bytes), 64 * MiB) if not quick else 16 * MiB
    # exponentials must not wait for memory: on a CPU the vector stays in L2
    count = 2**24 if gpu else max(2**12, spec.l2_bytes // 16)
    gemm = {}
    for dtype in bench.dtypes:
        size = n // 4 if gpu and dtype == "float32" else n
        gemm[dtype] = 2.0 * size**3 / bench.seconds(bench.gemm(size, dtype), rounds)
    return Ceilings(
        device=spec.name,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        software=bench.software,
        gemm=gemm,
        copy=2.0 * large / bench.seconds(bench.copy(large), rounds),
        read=large / bench.seconds(bench.read(large), rounds),
        exp=count / bench.seconds(bench.exp(count), rounds),
    )
