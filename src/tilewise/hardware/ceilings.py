"""`measure()`: a machine's real ceilings (matrix products, copies, reads, exponentials), measured once and cached.

The figures are what the library the user has installed reaches on the machine as it is, so a roofline against them says
how much is left to gain in practice rather than on a datasheet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tilewise.errors import DeviceError
from tilewise.hardware.cache import cache_root, load_json, store_json
from tilewise.hardware.probe import probe_cpu, probe_gpu
from tilewise.hardware.spec import DeviceSpec, MiB
from tilewise.hardware.timers import steady_seconds

_VERSION = 2
STEADY = 0.1
"""A figure whose samples spread more, (p80 − p20) / median, is measured again, and is noisy if it stays so."""
TRIES = 4
_noisy: dict[Path, tuple[dict[str, Any], Ceilings]] = {}
"""Noisy measurements of this process by place: they are not stored, but a process keeps to one answer."""


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
    threads: int = 0
    """Threads of a CPU that computed; 0 for a GPU."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """(p80 − p20) / median of the samples, by figure."""

    @property
    def noisy(self) -> dict[str, float]:
        """The figures whose samples never became steady, with their spread."""
        return {name: spread for name, spread in self.spread.items() if spread > STEADY}

    @property
    def words(self) -> str:
        """When, with what and how well it was measured."""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        noise = ", ".join(f"{name} spreads {spread:.0%}" for name, spread in self.noisy.items())
        return f"{self.date}, {self.software}{threads}" + (f"; noisy: {noise}" if noise else "")

    def apply(self, spec: DeviceSpec) -> DeviceSpec:
        """`spec` with its peaks and rates replaced by what was measured."""
        source = f"measured: {self.words}"
        values: dict[str, Any] = {"peak": {**spec.peak, **self.gemm}}
        if self.read:
            values["dram_bandwidth"] = max(self.read, self.copy)
        if self.exp and not spec.is_gpu:  # on a GPU a plain exp kernel is bound by memory, not by its exponential units
            values["exp_rate"] = self.exp
        return spec.with_figures(source, **values)


def measure(
    device: str = "cpu", *, refresh: bool = False, quick: bool = False, cache_dir: Path | None = None
) -> Ceilings:
    """The ceilings of the live `device` (`"cpu"`, `"cuda[:i]"`), from the cache unless `refresh`; `quick` takes small sizes.

    They are kept for each machine, number of threads and version of torch. A noisy measurement is repeated, and not kept if it
    stays noisy.
    """
    found = None if refresh else stored(device, quick=quick, cache_dir=cache_dir)
    if found is not None:
        return found
    spec, bench, path, identity = _place(device, quick, cache_dir)
    ceilings = _run(spec, bench, quick)
    _noisy.pop(path, None)
    if ceilings.noisy:
        _noisy[path] = identity, ceilings
    else:
        store_json(path, identity, asdict(ceilings))
    return ceilings


def stored(device: str = "cpu", *, quick: bool = False, cache_dir: Path | None = None) -> Ceilings | None:
    """What was measured of the live `device` with as many threads as there are now; None if nothing was."""
    _, _, path, identity = _place(device, quick, cache_dir)
    payload = load_json(path, identity)
    if payload is not None:
        return Ceilings(**payload)
    before, ceilings = _noisy.get(path, (None, None))
    return ceilings if before == identity else None


def _place(device: str, quick: bool, cache_dir: Path | None) -> tuple[DeviceSpec, _Bench, Path, dict[str, Any]]:
    """The live device, what measures it, and where and by which identity its ceilings are kept."""
    spec = probe_cpu() if device == "cpu" else probe_gpu(int(device.partition(":")[2] or 0))
    if spec is None or (device != "cpu" and not device.startswith("cuda")):
        raise DeviceError(f"device: cannot measure {device!r}, only the live 'cpu' or a visible 'cuda[:i]'")
    bench = _Bench(device)
    identity = {
        **{"version": _VERSION, "name": spec.name, "units": spec.units, "threads": bench.threads},
        **{"software": bench.software, "quick": quick},
    }
    threads = f"-{bench.threads}-threads" if bench.threads else ""
    plain = "".join(ch if ch.isalnum() else "-" for ch in f"{spec.name}-{spec.units}{threads}".lower())
    return spec, bench, (cache_dir or cache_root()) / f"ceilings-{plain}.json", identity


class _Bench:
    """A CPU or GPU through torch."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, device
        self.software = f"torch {torch.__version__}"
        self.threads = torch.get_num_threads() if device == "cpu" else 0
        self.dtypes = ("float32", "float64") if device == "cpu" else ("float16", "bfloat16", "tf32", "float32")

    def seconds(self, call: Callable[[], Any], rounds: int) -> tuple[float, float]:
        return steady_seconds(call, self.device, rounds, STEADY, TRIES)

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
    made: dict[
        str, tuple[float, Callable[[], Any]]
    ] = {}  # FLOPs, bytes or exponentials of a call, and what makes the call
    for dtype in bench.dtypes:
        size = n // 4 if gpu and dtype == "float32" else n
        made[f"gemm {dtype}"] = 2.0 * size**3, partial(bench.gemm, size, dtype)
    made["copy"], made["read"] = (2.0 * large, partial(bench.copy, large)), (large, partial(bench.read, large))
    made["exp"] = count, partial(bench.exp, count)
    rates, spread = {}, {}
    for name, (amount, make) in made.items():
        seconds, spread[name] = bench.seconds(make(), rounds)
        rates[name] = amount / seconds
    return Ceilings(
        device=spec.name,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        software=bench.software,
        gemm={dtype: rates[f"gemm {dtype}"] for dtype in bench.dtypes},
        copy=rates["copy"],
        read=rates["read"],
        exp=rates["exp"],
        threads=bench.threads,
        spread=spread,
    )
