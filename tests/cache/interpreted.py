"""Attention over caches by the Triton kernels in the interpreter, as a program of its own: see `tests/backends/interpreted.py`.

    TRITON_INTERPRET=1 python -m tests.cache.interpreted 0 2       every second case from the first
    TRITON_INTERPRET=1 python -m tests.cache.interpreted int8      the cases of that name
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.cache.caches import build, worst
from tests.cache.test_cached import CASES, MIXED, OPTIONS, attend
from tilewise.api import cached

LEFT_OUT = {"float64", "double"}
"""Kernels here sum in float32."""


def conform(name: str) -> None:
    case, options = CASES.get(name, {}), dict(OPTIONS.get(name, {}))
    if not case:
        rows, lengths = MIXED
        case = {"rows": [min(m, n) for m, n in zip(rows, lengths, strict=True)], "lengths": lengths}
    built = build(**case)
    out, lse = attend(built, "triton", **options)
    assert out.dtype == built.q.dtype and not out.isnan().any(), "NaN"
    error = worst(built, out, lse, **options)
    assert error <= 1.0, f"{error} of the bound"


def main() -> int:
    del cached.gathered  # no token is copied
    checks: dict[str, Callable[[], None]] = {}
    for name in (*CASES, *OPTIONS):
        if name not in LEFT_OUT:
            checks[name] = lambda name=name: conform(name)  # type: ignore[misc]
    words = sys.argv[1:]
    if words[0].isdigit():
        names = list(checks)[int(words[0]) :: int(words[1])]
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


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
