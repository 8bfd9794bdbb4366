"""Machines: every figure has a source, the live one can be read, its ceilings measured and cached."""

from __future__ import annotations

import ctypes
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise import hardware
from tilewise.errors import DeviceError
from tilewise.hardware import DeviceSpec, catalogue, ceilings, device, host, lookup, measure, probe, probe_cpu, timers
from tilewise.hardware.catalogue import closest_gpu
from tilewise.hardware.cpuid import core_figures, isa_of
from tilewise.hardware.host import Host, cpu_spec, linux_host, parse_cpu_list, parse_size
from tilewise.hardware.probe import gpu_spec

WANTED = [
    "v100",
    "a100-40",
    "a100-80",
    "a10",
    "l4",
    "l40s",
    "rtx3090",
    "rtx4090",
    "rtx5090",
    "h100",
    "h100-pcie",
    "h200",
]
WANTED += ["b200", "mi300x"]
KINDS = ("derived:", "estimate:", "probed:", "measured:")


@pytest.mark.parametrize("key", list(catalogue()))
def test_every_figure_has_a_source(key: str) -> None:
    spec = catalogue()[key]
    assert set(spec.figures()) <= set(spec.sources), set(spec.figures()) - set(spec.sources)
    assert set(spec.sources) <= set(spec.figures()), "a source without its figure"
    for name, source in spec.sources.items():
        assert len(source) > 12, (name, source)
    cited = [source for source in spec.sources.values() if not source.startswith(KINDS)]
    assert len(cited) >= len(spec.sources) / 2, "most figures are cited, not guessed"


def test_the_catalogue_is_complete() -> None:
    assert set(WANTED) <= set(catalogue())
    cpus = [spec for spec in catalogue().values() if not spec.is_gpu]
    assert {spec.isa for spec in cpus} >= {"neon", "avx512"}


@pytest.mark.parametrize("spec", catalogue().values(), ids=lambda spec: spec.key)
def test_figures_are_sane(spec: DeviceSpec) -> None:
    assert spec.units > 0 and spec.dram_bandwidth > 1e10 and spec.exp_rate > 1e9
    assert spec.sram_per_block <= spec.sram_bytes < spec.l2_bytes
    if spec.is_gpu:
        assert spec.l2_bandwidth > spec.dram_bandwidth
        assert spec.flops("float16") > spec.flops("float32") > 0
        # the published tensor rate is a whole number of FLOPs a clock and unit, to the rounding of the datasheet
        per_clock = spec.flops("float16") / (spec.units * spec.clock_hz)
        assert per_clock == pytest.approx(2 ** round(math.log2(per_clock)), rel=0.04), per_clock
    else:
        assert spec.flops("float32") == spec.units * spec.clock_hz * spec.fma_per_cycle * spec.lanes() * 2
        assert spec.register_bytes == spec.vector_registers * spec.simd_bits // 8


def test_ridge_of_catalogued_machines() -> None:
    assert lookup("h100").ridge("bfloat16") == pytest.approx(295.3, abs=0.1)
    assert lookup("h200").ridge("bfloat16") == pytest.approx(206.1, abs=0.1)


def test_fp32_takes_three_tf32_products_where_that_is_faster() -> None:
    spec = lookup("h200")
    assert spec.flops("float32", "tf32") == spec.peak["tf32"]
    assert spec.flops("float32") == spec.peak["tf32"] / 3 > spec.peak["float32"]
    assert lookup("v100").flops("float32") == lookup("v100").peak["float32"]
    assert lookup("v100").flops("bfloat16") == 0.0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("H200", "h200"),
        ("a100", "a100-80"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA H100 PCIe 80GB", "h100-pcie"),
        ("4090", "rtx4090"),
    ],
)
def test_lookup(name: str, key: str) -> None:
    assert lookup(name).key == key


@pytest.mark.parametrize(
    ("name", "near"), [("h20", "h200"), ("a1000", "a100"), ("rtx409", "rtx4090"), ("mi300", "mi300x")]
)
def test_unknown_devices_get_near_matches(name: str, near: str) -> None:
    with pytest.raises(DeviceError, match=rf"device: unknown '{name}'; did you mean .*{near}.*Known: v100"):
        lookup(name)


def test_missing_gpus_and_nonsense_raise() -> None:
    with pytest.raises(DeviceError, match="device: 'cuda:99' is not there"):
        device("cuda:99")
    with pytest.raises(DeviceError, match="need 'cpu' or a visible"):
        probe("cuda:x")
    with pytest.raises(DeviceError, match="Known"):
        device("zzzzzz")


def test_specs_are_values() -> None:
    spec = lookup("h200")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))
    assert spec.capability == (9, 0) and lookup("b200").capability == (10, 0) and lookup("mi300x").capability is None
    assert json.loads(json.dumps(spec.to_dict()))["units"] == 132
    with pytest.raises(TypeError):
        spec.peak["float16"] = 1.0  # type: ignore[index]
    changed = spec.with_figures("measured: today", dram_bandwidth=4.26e12)
    assert changed.sources["dram_bandwidth"] == "measured: today" and changed != spec


# the live machine


def test_probe_never_raises_and_is_plausible() -> None:
    spec = probe_cpu()
    assert spec.kind == "cpu" and spec.cores >= 1 and spec.simd_bits >= 32
    assert spec.l1d_bytes >= 8 * 1024 and spec.l2_bytes >= spec.l1d_bytes
    assert set(spec.figures()) <= set(spec.sources)
    assert probe("cpu") == device("cpu") == probe_cpu(probe("cpu").threads)
    assert set(probe("cpu").figures()) <= set(probe("cpu").sources)
    assert spec.workers == spec.cores and probe_cpu(3).workers == 3


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _cache(level: int, kind: str, size: str) -> dict[str, str]:
    base = f"sys/devices/system/cpu/cpu0/cache/index{level}{kind[0]}"
    return {f"{base}/level": str(level), f"{base}/type": kind, f"{base}/size": size}


def test_linux_on_x86(tmp_path: Path) -> None:
    """A Xeon with hyper-threads and a quota: two threads a core, four CPUs allowed, one and a half cores' worth."""
    cpu = "sys/devices/system/cpu"
    _write(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel Xeon Test\ncpu MHz\t: 2700.0\n"
            "flags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile f16c\n",
            **_cache(1, "Data", "48K"),
            **_cache(1, "Instruction", "32K"),
            **_cache(2, "Unified", "2048K"),
            **_cache(3, "Unified", "105M"),
            **{f"{cpu}/cpu{i}/topology/thread_siblings_list": f"{i % 2},{i % 2 + 2}\n" for i in range(4)},
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    )
    spec = cpu_spec(linux_host(Host(machine="x86_64"), tmp_path, {0, 1, 2, 3}))
    assert (spec.isa, spec.simd_bits, spec.vector_registers, spec.vendor) == ("avx512", 512, 32, "Intel")
    assert (spec.l1d_bytes, spec.l2_bytes, spec.l3_bytes) == (48 * 1024, 2048 * 1024, 105 * 2**20)
    assert spec.cores == 2 and spec.clock_hz == 2.7e9
    assert {"amx_bf16", "avx512_bf16"} <= set(spec.isa_flags)
    _write(tmp_path, {"sys/fs/cgroup/cpu.max": "100000 100000\n"})
    assert linux_host(Host(machine="x86_64"), tmp_path, {0, 1, 2, 3}).cores == 1


def test_linux_on_arm(tmp_path: Path) -> None:
    text = "processor : 0\nFeatures : fp asimd asimdhp\nCPU implementer : 0x41\nCPU part : 0xd40\n"
    _write(tmp_path, {"proc/cpuinfo": text, **_cache(1, "Data", "64K"), **_cache(2, "Unified", "1M")})
    spec = cpu_spec(linux_host(Host(machine="aarch64"), tmp_path, {0}))
    assert (spec.isa, spec.name, spec.fma_per_cycle) == ("neon", "Neoverse V1", 4)


def test_zen_4_halves_wide_operations(tmp_path: Path) -> None:
    text = "vendor_id : AuthenticAMD\ncpu family : 25\nflags : avx2 fma avx512f\n"
    _write(tmp_path, {"proc/cpuinfo": text})
    assert cpu_spec(linux_host(Host(machine="x86_64"), tmp_path, {0})).fma_per_cycle == 1


def test_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """An M2 Max: eight fast cores, four to each 16 MiB of L2."""
    told = {
        "machdep.cpu.brand_string": "Apple M2 Max",
        "hw.perflevel0.physicalcpu": "8",
        "hw.physicalcpu": "12",
        "hw.perflevel0.l1dcachesize": "131072",
        "hw.perflevel0.l2cachesize": "16777216",
        "hw.perflevel0.cpusperl2": "4",
        "hw.memsize": "34359738368",
        "hw.optional.arm.FEAT_BF16": "1",
    }
    monkeypatch.setattr(host, "_sysctl", lambda name: told.get(name, ""))
    spec = cpu_spec(host._macos(Host(machine="arm64")))
    assert (spec.name, spec.vendor, spec.isa, spec.arch) == ("Apple M2 Max", "Apple", "neon", "aarch64")
    assert (spec.cores, spec.l1d_bytes, spec.l2_bytes, spec.fma_per_cycle) == (8, 128 * 1024, 4 * 2**20, 4)
    assert "bf16" in spec.isa_flags and spec.dram_bytes == 32 * 2**30


def test_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores with their caches, as kernel32 lists them."""
    entries = [
        (0, 0, 0, 0),
        (0, 0, 0, 0),
        (2, 1, 48 * 1024, 2),
        (2, 1, 32 * 1024, 1),
        (2, 2, 2**21, 0),
        (2, 3, 2**25, 0),
    ]

    class Kernel:
        def GetLogicalProcessorInformation(self, table: Any, length: Any) -> int:
            length._obj.value = len(entries) * ctypes.sizeof(host._Relation)
            for slot, (relationship, level, size, kind) in zip(table or (), entries, strict=False):
                slot.relationship, slot.level, slot.size, slot.kind = relationship, level, size, kind
            return 1

        def IsProcessorFeaturePresent(self, number: int) -> int:
            return int(number == 40)

    monkeypatch.setattr(ctypes, "WinDLL", lambda name: Kernel(), raising=False)
    spec = cpu_spec(host._windows(Host(machine="amd64")))
    assert (spec.isa, spec.cores, spec.arch) == ("avx2", 2, "x86_64")
    assert (spec.l1d_bytes, spec.l2_bytes, spec.l3_bytes) == (48 * 1024, 2**21, 2**25)


def test_a_failing_reader_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Host) -> Host:
        raise OSError("no such file")

    monkeypatch.setattr(host, "_linux", broken)
    monkeypatch.setattr(host, "sys", SimpleNamespace(platform="linux"))
    assert host.read_host().cores >= 1


def test_a_silent_system_gets_safe_guesses() -> None:
    spec = cpu_spec(Host(machine="riscv64"))
    assert spec.isa == "scalar" and spec.cores == 1
    assert spec.sources["sram_bytes"].startswith("estimate:")
    assert cpu_spec(Host(machine="amd64", flags=frozenset({"avx2", "fma"}))).isa == "avx2"


@pytest.mark.parametrize(
    ("machine", "flags", "bits", "isa"),
    [
        ("arm64", {"asimd"}, 0, "neon"),
        ("aarch64", {"sve"}, 256, "neon"),
        ("aarch64", {"sve"}, 512, "sve"),
        ("x86_64", {"avx2"}, 0, "sse2"),
        ("x86_64", {"avx2", "fma", "avx512f"}, 0, "avx512"),
    ],
)
def test_instruction_sets(machine: str, flags: set[str], bits: int, isa: str) -> None:
    assert isa_of(machine, frozenset(flags), bits) == isa
    assert core_figures(isa)[0]["vector_registers"] in (16, 32)


def test_parsers() -> None:
    assert (parse_size("64K"), parse_size("32M\n"), parse_size("12"), parse_size("?")) == (65536, 2**25, 12, 0)
    assert parse_cpu_list("0-2,8\n") == {0, 1, 2, 8} and parse_cpu_list("") == set()


def _properties(name: str, major: int, minor: int, units: int, **more: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=units, total_memory=80 * 2**30, L2_cache_size=50 * 2**20,
        shared_memory_per_multiprocessor=228 * 1024, shared_memory_per_block_optin=227 * 1024,
        max_threads_per_multi_processor=2048, **more,
    )  # fmt: skip


def test_live_gpus_are_completed_from_the_catalogue() -> None:
    spec = gpu_spec(_properties("NVIDIA H200", 9, 0, 132))
    assert spec.key == "h200" and spec.flops("bfloat16") == lookup("h200").flops("bfloat16")
    assert spec.sources["units"].startswith("probed:") and spec.dram_bytes == 80 * 2**30
    smaller = gpu_spec(_properties("NVIDIA H200 MIG", 9, 0, 66))
    assert smaller.flops("float16") == pytest.approx(lookup("h200").flops("float16") / 2)
    assert closest_gpu("NVIDIA A100-PCIE-40GB", "sm_80") == lookup("a100-40")
    assert closest_gpu("NVIDIA H100 PCIe", "sm_90") == lookup("h100-pcie")
    assert closest_gpu("NVIDIA H100 80GB HBM3", "sm_90") == lookup("h100")
    assert closest_gpu("NVIDIA A100-SXM4-80GB", "sm_80") == lookup("a100-80")
    assert closest_gpu("NVIDIA A10", "sm_86") == lookup("a10")
    assert closest_gpu("NVIDIA GeForce RTX 4090", "sm_89") == lookup("rtx4090")
    assert closest_gpu("NVIDIA GH200 480GB", "sm_90") == lookup("h100"), "not by name: by architecture"
    assert closest_gpu("Mystery", "sm_75") is None


def test_unknown_gpus_get_careful_guesses() -> None:
    spec = gpu_spec(_properties("Mystery 9000", 7, 5, 40, clock_rate=1_500_000))
    assert spec.arch == "sm_75" and spec.flops("float16") > 0 and spec.sram_per_block == 227 * 1024
    assert spec.sources["peak"].startswith("estimate:")


# measuring


def test_measured_ceilings_are_cached_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "STEADY", float("inf"))
    first = measure("cpu", quick=True, cache_dir=tmp_path)
    assert first.gemm["float32"] > 1e8 and first.read > 1e8 and first.copy > 1e8 and first.exp > 1e6
    (file,) = tmp_path.glob("ceilings-*.json")
    stored = json.loads(file.read_text())
    stored["payload"]["read"] = 1.0
    assert measure("cpu", quick=True, cache_dir=tmp_path) == first
    file.write_text(json.dumps(stored))  # a changed figure no longer verifies
    assert measure("cpu", quick=True, cache_dir=tmp_path).read != 1.0
    file.write_text("{")
    assert measure("cpu", quick=True, cache_dir=tmp_path).read > 1e8
    assert not list(tmp_path.glob("*.part"))
    better = first.apply(probe_cpu())
    assert better.dram_bandwidth == max(first.read, first.copy)
    assert better.sources["peak"].startswith("measured:")


class Stopwatch:
    """A device whose calls last as long as planned, in turn."""

    def __init__(self, *rounds: float) -> None:
        self.rounds, self.calls = rounds, 0

    def __call__(self, run: object, number: int) -> float:
        self.calls += 1
        return self.rounds[self.calls % len(self.rounds)]


def test_a_noisy_measurement_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    steady, noisy = Stopwatch(1.0), Stopwatch(1.0, 2.0)
    for watch, tries in ((steady, 1), (noisy, 4)):
        monkeypatch.setattr(timers, "clock_for", lambda device, watch=watch: watch)
        middle, spread = timers.steady_seconds(lambda: None, "cpu", 5, 0.1, 4)
        assert watch.calls == 2 + 5 * tries and 1.0 <= middle <= 2.0
        assert (spread <= 0.1) == (watch is steady)


def test_ceilings_are_kept_by_threads_and_only_if_steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, threads = Stopwatch(1.0), 3
    monkeypatch.setattr(timers, "clock_for", lambda device: watch)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)

    def quick(**options: bool) -> ceilings.Ceilings:
        return measure("cpu", quick=True, cache_dir=tmp_path, **options)

    first = quick()
    assert first.threads == 3 and not first.noisy and "3 threads" in first.words and "noisy" not in first.words
    threads, watch = 1, Stopwatch(2.0)
    alone = quick()
    assert alone.threads == 1 and alone.read < first.read, "other threads, other ceilings"
    assert len(list(tmp_path.glob("ceilings-*.json"))) == 2
    threads, watch = 3, Stopwatch(5.0, 9.0)
    assert quick() == first, "kept"
    noisy = quick(refresh=True)
    assert set(noisy.noisy) == {"gemm float32", "gemm float64", "copy", "read", "exp"}
    assert "noisy: gemm float32 spreads" in noisy.words and "noisy" in noisy.apply(probe_cpu()).sources["peak"]
    assert quick() == first, "a noisy measurement does not replace a steady one"
    threads = 2
    noisy, again = quick(), quick()
    assert noisy.noisy and again == noisy and len(list(tmp_path.glob("ceilings-*.json"))) == 2


def test_what_cannot_be_measured_raises() -> None:
    with pytest.raises(DeviceError, match="cannot measure 'h200'"):
        measure("h200")


def test_importing_needs_no_torch() -> None:
    code = (
        "import sys, tilewise.hardware, tilewise.model, tilewise.lab.simulator as s;"
        "from tilewise.model import plan; from tilewise.problem import Problem;"
        "plan(Problem.of(heads=1, seqlen=64, head_dim=64), 'h200');"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules, sorted(sys.modules)"
    )
    source = Path(hardware.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(source)})
    assert hardware.__all__
