"""What a record must say about where it was made: machine and versions."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from tilewise.errors import DeviceError
from tilewise.hardware import probe_cpu, probe_gpu

PACKAGES = ("torch", "triton", "numpy", "llvmlite", "typer", "rich", "plotly", "jinja2", "platformdirs")
OPTIONAL = ("transformers", "flash_attn", "xformers", "flashinfer-python", "nvidia-cudnn-frontend")


def require_device(device: str) -> None:
    """Raise unless torch has such a device here."""
    import torch

    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise DeviceError(f"device: got {device!r}, need cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceError("device: cuda is wanted, but torch finds no GPU here; choose --device cpu, or another suite")


def version_of(package: str) -> str | None:
    if package == "torch":  # which says more of itself than its package does: the build
        import torch

        return str(torch.__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Python, tilewise and what it builds on, as far as installed."""
    from tilewise import __version__

    found = {name: version for name in (*PACKAGES, *OPTIONAL) if (version := version_of(name))}
    return {"python": platform.python_version(), "tilewise": __version__, **found}


def machine() -> dict[str, Any]:
    """The machine in words and numbers, as far as it can be read without measuring."""
    import torch

    cpu = probe_cpu()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": cpu.arch,
        "cpu": cpu.name,
        "cores": cpu.units,
        "threads": torch.get_num_threads(),
        "isa": " ".join((cpu.isa, *cpu.isa_flags)),
        "l1_bytes": cpu.sram_bytes,
        "l2_bytes": cpu.l2_bytes,
        "l3_bytes": cpu.l3_bytes,
        "memory_bytes": cpu.dram_bytes,
        "gpus": [
            {"name": gpu.name, "arch": gpu.arch, "multiprocessors": gpu.units, "memory_bytes": gpu.dram_bytes}
            for index in range(torch.cuda.device_count())
            if (gpu := probe_gpu(index)) is not None
        ],
    }


def available_bytes() -> int | None:
    """Memory free to use; None where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None
