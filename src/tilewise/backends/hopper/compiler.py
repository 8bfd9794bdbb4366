"""What of a plan depends on the compiler that is installed. Nothing is imported to find out which one is."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def newer_registers() -> bool:
    """From 3.8 on Triton's compiler needs so many more registers that loops spill where a mask meets the widest tile or queries
    in registers, or head dim 128 rows that begin after key 0 or keys that no query sees. Without Triton: not so."""
    for name in ("triton", "pytorch-triton"):
        try:
            major, minor = version(name).split(".")[:2]
        except PackageNotFoundError:
            continue
        return (int(major), int(minor)) >= (3, 8)
    return False
