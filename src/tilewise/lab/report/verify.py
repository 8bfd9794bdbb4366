"""Run kernels under Nsight Compute and hold the IO model to what the hardware counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilewise.errors import DeviceError
from tilewise.hardware import probe_gpu
from tilewise.lab.bench.machine import machine, versions
from tilewise.lab.report.counters import METRICS, PASSES, KernelTraffic, TrafficCase, compare, launches
from tilewise.model import TilePlan

USUAL = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
CASES = (
    TrafficCase(seqlen=4096),
    TrafficCase(seqlen=4096, mask="causal"),
    TrafficCase(seqlen=8192, mask="causal"),
    TrafficCase(seqlen=8192, head_dim=64, mask="causal"),
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


def command(ncu: str, case: TrafficCase, note: Path) -> list[str]:
    """Caches are emptied before each kernel, as the model assumes; clocks are left as they are."""
    names = "|".join(PASSES)
    return [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--target-processes", "all", "--cache-control", "all",
        "--clock-control", "none", "--kernel-name", f"regex:{names}", "--metrics", ",".join(METRICS),
        sys.executable, "-m", "tilewise.lab.report.counted", json.dumps(asdict(case)), str(note),
    ]  # fmt: skip


def count(ncu: str, case: TrafficCase, timeout: float = 600.0) -> tuple[list[KernelTraffic], dict[str, str], str]:
    """One case under ncu: its kernels beside the model, the backends that ran, and ncu's own output."""
    spec = probe_gpu(0)
    if spec is None:
        raise DeviceError("verify-traffic: ncu is here, but torch sees no GPU; run it where there is one")
    with tempfile.TemporaryDirectory() as directory:
        note = Path(directory) / "note.json"
        run = subprocess.run(command(ncu, case, note), capture_output=True, text=True, timeout=timeout, check=False)
        if "ERR_NVGPUCTRPERM" in run.stdout + run.stderr:
            raise DeviceError(
                "verify-traffic: the driver lets only administrators read counters (ERR_NVGPUCTRPERM); run as root, or "
                "load the driver with NVreg_RestrictProfilingToAdminUsers=0"
            )
        if run.returncode or not note.exists():
            raise DeviceError(
                f"verify-traffic: ncu failed on {case.describe()}: {(run.stderr or run.stdout).strip()[-600:]}"
            )
        noted = json.loads(note.read_text())
    tiles = {name: TilePlan(**tile) for name, tile in noted["tiles"].items()}
    return compare(case, tiles, launches(run.stdout), spec), noted["backends"], run.stdout


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
