"""Resident memory of this process, as the operating system counts it: it sees what an allocator may not report."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch


class Resident(NamedTuple):
    """Bytes in use now, and the most there ever were (since the last `forget_peak`, where the system can forget)."""

    now: int
    peak: int


def resident() -> Resident:
    """Not from getrusage on Linux: there a child inherits the peak of the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return Resident(*(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")))
    if sys.platform == "win32":
        return _resident_windows()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Resident(peak, peak)


def forget_peak() -> None:
    """Start a new peak at the present use; where the system cannot, the old peak stays and hides smaller ones."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def begin_peak(device: str) -> int:
    """Start a new peak of a device's memory; the bytes in use now. A CPU's are those of this process."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    forget_peak()
    return resident().now


def peak_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resident().peak


def _resident_windows() -> Resident:
    if sys.platform != "win32":
        raise AssertionError("called on Windows only")
    import ctypes
    from ctypes import wintypes

    class Counters(ctypes.Structure):
        _fields_ = [
            ("cb", wintypes.DWORD),
            ("PageFaultCount", wintypes.DWORD),
            ("PeakWorkingSetSize", ctypes.c_size_t),
            ("WorkingSetSize", ctypes.c_size_t),
            *((f"unused{i}", ctypes.c_size_t) for i in range(6)),
        ]

    counters = Counters(cb=ctypes.sizeof(Counters))
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel32.GetCurrentProcess.restype = wintypes.HANDLE
    kernel32.K32GetProcessMemoryInfo.argtypes = [wintypes.HANDLE, ctypes.POINTER(Counters), wintypes.DWORD]
    if not kernel32.K32GetProcessMemoryInfo(kernel32.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
        raise ctypes.WinError(ctypes.get_last_error())
    return Resident(counters.WorkingSetSize, counters.PeakWorkingSetSize)
