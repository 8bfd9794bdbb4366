"""Checks as a program of its own, which Triton's interpreter asks for: each with its time, and what went wrong."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import torch


def run_checks(checks: Mapping[str, Callable[[], None]], often: Sequence[str], words: Sequence[str]) -> int:
    """How many fail of those whose names hold a word; of two numbers, first and step: of those that are run often."""
    torch.manual_seed(0)
    if words[0].isdigit():
        names = [*often[int(words[0]) :: int(words[1])]]
    else:
        names = [name for name in checks if any(word in name for word in words)]
    failed = 0
    for name in names:
        start = time.perf_counter()
        try:
            checks[name]()
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: FAILED\n{traceback.format_exc()[-1500:]}", flush=True)
    return failed
