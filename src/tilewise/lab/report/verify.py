"""Run kernels under Nsight Compute and hold the IO model to what the hardware counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilewise.backends import plans
from tilewise.errors import DeviceError
from tilewise.hardware import DeviceSpec, probe_gpu
from tilewise.lab.bench.machine import machine, versions
from tilewise.lab.report.counters import KERNELS, METRICS, RUNS, KernelTraffic, TrafficCase, compare, launches, runs_of
from tilewise.model import TilePlan

USUAL = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
CASES = (
    TrafficCase(seqlen=4096),
    TrafficCase(seqlen=4096, head_dim=64),
    TrafficCase(seqlen=4096, heads=8, kv_heads=8, head_dim=256),
    TrafficCase(seqlen=8192),
    TrafficCase(seqlen=4096, mask="causal"),
    TrafficCase(seqlen=4096, mask="causal", deterministic=True),
    TrafficCase(seqlen=8192, mask="causal"),
    TrafficCase(seqlen=8192, head_dim=64, mask="causal"),
    TrafficCase(seqlen=8192, heads=8, kv_heads=8, head_dim=256, mask="causal"),
    TrafficCase(seqlen=8192, kv_heads=4, mask="causal"),
    TrafficCase(seqlen=8192, mask="causal & window(1024)"),
)


def find_ncu(given: str | None = None) -> str:
    """Nsight Compute's command line, or an error that says what is missing."""
    for candidate in (given, shutil.which("ncu"), *USUAL):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise DeviceError(
        "verify-traffic: there is no Nsight Compute here (ncu, of the CUDA toolkit), so the model's bytes cannot be counted; "
        "install it on a machine with an NVIDIA GPU, or name it with --ncu"
    )


def command(ncu: str, cases: Sequence[TrafficCase], note: Path) -> list[str]:
    """Caches are emptied before each kernel, as the model assumes; clocks are left as they are."""
    names = "|".join(KERNELS)
    return [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--target-processes", "all", "--cache-control", "all",
        "--clock-control", "none", "--kernel-name", f"regex:{names}", "--metrics", ",".join(METRICS),
        sys.executable, "-m", "tilewise.lab.report.counted", json.dumps([asdict(case) for case in cases]), str(note),
    ]  # fmt: skip


Counted = tuple[list[KernelTraffic], dict[str, str]]
"""A case's kernels beside the model, and the backends that ran."""


def count(ncu: str, cases: Sequence[TrafficCase], timeout: float = 600.0) -> list[Counted]:
    """All cases in one program under ncu."""
    spec = probe_gpu(0)
    if spec is None:
        raise DeviceError("verify-traffic: ncu is here, but torch sees no GPU; run it where there is one")
    with tempfile.TemporaryDirectory() as directory:
        note = Path(directory) / "note.json"
        run = subprocess.run(command(ncu, cases, note), capture_output=True, text=True, timeout=timeout, check=False)
        if "ERR_NVGPUCTRPERM" in run.stdout + run.stderr:
            raise DeviceError(
                "verify-traffic: the driver lets only administrators read counters (ERR_NVGPUCTRPERM); run as root, or "
                "load the driver with NVreg_RestrictProfilingToAdminUsers=0"
            )
        if run.returncode or not note.exists():
            raise DeviceError(f"verify-traffic: ncu failed: {(run.stderr or run.stdout).strip()[-600:]}")
        notes = json.loads(note.read_text())
    return understood(cases, notes, run.stdout, spec)


def understood(
    cases: Sequence[TrafficCase], notes: list[dict[str, Any]], text: str, spec: DeviceSpec
) -> list[Counted]:
    """What ncu printed, by case."""
    runs = runs_of(launches(text))
    if len(runs) != RUNS * len(cases):
        raise DeviceError(f"verify-traffic: ncu counted {len(runs)} forwards, {RUNS * len(cases)} were run")
    found = []
    for number, (case, noted) in enumerate(zip(cases, notes, strict=True)):
        tiles = {name: ordered(tile_of(fields), case, noted["backends"], spec) for name, fields in noted["tiles"].items()}
        own = runs[RUNS * number : RUNS * (number + 1)]
        found.append((compare(case, tiles, own, spec), noted["backends"]))
    return found


def tile_of(fields: dict[str, Any]) -> TilePlan:
    """A tile from its JSON."""
    lists = {"on_chip": tuple(fields["on_chip"].items()), "reasons": tuple(fields["reasons"])}
    pair = fields["register_tile"]
    return TilePlan(**{**fields, **lists, "register_tile": pair and tuple(pair)})


def ordered(tile: TilePlan, case: TrafficCase, backends: Mapping[str, str], spec: DeviceSpec) -> TilePlan:
    """The tile that ran with the order of its work tiles, which JSON does not hold."""
    backend = backends["backward" if tile.pass_.startswith("backward") else "forward"]
    return next((one for one in plans.choices(backend, case.problem(), spec, tile.pass_) if one == tile), tile)


def document(kernels: list[KernelTraffic], backends: list[dict[str, str]], ncu: str) -> dict[str, Any]:
    """The record: what was counted, where and with which versions."""
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    spec = probe_gpu(0)
    return {
        "format": 1,
        "suite": "traffic",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": spec.name if spec else "",
        "machine": machine(),
        "versions": {**versions(), "ncu": version.rpartition("\n")[2]},
        "ok": all(kernel.ok for kernel in kernels),
        "kernels": [{**k.to_dict(), "backends": b} for k, b in zip(kernels, backends, strict=True)],
    }
