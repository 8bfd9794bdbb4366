"""Torch's own OpenMP threads, where they can be had: they are awake already, and they hold the cores.

After a parallel region OpenMP's threads spin for a while, waiting for the next. Threads of our own would have to be woken by the
system and then share the cores with them; on 16 cores that cost eight times a small call. So kernels run as a parallel region of
the OpenMP runtime that torch has loaded, in a team of torch's size, since the runtime ends and starts threads when that changes.
Where no such runtime is found (other than GNU's, other systems) the pool of `schedule` does the same work.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import get_num_threads

from tilewise.backends.cpu.compile import load_text

JOB = struct.Struct("=6q")
ENTRY = """
define void @team(ptr %job) nounwind {
  %slot = atomicrmw add ptr %job, i64 1 monotonic
  %limit_at = getelementptr i64, ptr %job, i64 1
  %limit = load i64, ptr %limit_at
  %invited = icmp slt i64 %slot, %limit
  br i1 %invited, label %work, label %done
work:
  %call_at = getelementptr i64, ptr %job, i64 2
  %args_at = getelementptr i64, ptr %job, i64 3
  %base_at = getelementptr i64, ptr %job, i64 4
  %step_at = getelementptr i64, ptr %job, i64 5
  %call = load ptr, ptr %call_at
  %args = load ptr, ptr %args_at
  %base = load ptr, ptr %base_at
  %step = load i64, ptr %step_at
  %offset = mul i64 %slot, %step
  %buffer = getelementptr i8, ptr %base, i64 %offset
  call void %call(ptr %args, ptr %buffer)
  br label %done
done:
  ret void
}
"""
"""What each thread of the team does: take a slot and, if invited, work with the buffer of that slot. Without `nounwind` an object
for x86 comes with tables that only LLVM's loader can place."""


@cache
def team() -> Callable[[int, int, int, int, int], None] | None:
    """Runs a kernel on the team of this process, if its OpenMP runtime is GNU's; a forked child never uses its parent's."""
    runtime = _runtime()
    if runtime is None:
        return None
    region = runtime.GOMP_parallel
    region.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    region.restype = None
    try:
        entry = load_text(ENTRY, "team")
    except (OSError, RuntimeError):  # it cannot be compiled: threads of our own do the same work
        return None

    def run(call: int, args: int, buffers: int, step: int, invited: int) -> None:
        """`call(args, buffers + slot · step)` on `invited` threads of the team; returns when all are done."""
        job = ctypes.create_string_buffer(JOB.pack(0, invited, call, args, buffers, step), JOB.size)
        region(entry.address, ctypes.addressof(job), get_num_threads(), 0)

    return run


def _runtime() -> Any:
    """The runtime torch has loaded: opening it again by its path gives the same one."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split(maxsplit=5)[5].strip() for line in file if "/libgomp" in line}
        libraries = [ctypes.CDLL(path) for path in sorted(paths)]
    except OSError:
        return None
    return libraries[0] if len(libraries) == 1 and hasattr(libraries[0], "GOMP_parallel") else None


def _forget() -> None:
    """The child of a fork has none of the runtime's threads, and must not wait for them."""
    team.cache_clear()
    globals()["_runtime"] = lambda: None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
