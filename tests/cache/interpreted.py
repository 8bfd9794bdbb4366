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
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

import tilewise as tw
from tests.cache.caches import build, worst
from tests.cache.test_cached import CASES, MIXED, OPTIONS, attend
from tilewise import dispatch
from tilewise.api import cached
from tilewise.backends.pages import gathered

LEFT_OUT = {"float64", "double"}
"""Kernels here sum in float32."""


def conform(name: str) -> None:
    case, options = CASES.get(name, {}), dict(OPTIONS.get(name, {}))
    if not case:
        rows, lengths = MIXED
        case = {"rows": [min(m, n) for m, n in zip(rows, lengths, strict=True)], "lengths": lengths}
    built = build(**case)
    cached.gathered = None  # type: ignore[assignment]  # no token is copied
    out, lse = attend(built, "triton", **options)
    assert out.dtype == built.q.dtype and not out.isnan().any(), "NaN"
    error = worst(built, out, lse, **options)
    assert error <= 1.0, f"{error} of the bound"


def turned_and_written(interleaved: bool, turned: int, page: int, dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """The kernel gives and writes what torch does, to a rounding of the dtype; without a rotation, the same bits."""
    cached.gathered = gathered
    given = {"page": page, "dtype": dtype, "stored": stored, "dims": (32, 24), "heads": (8, 2)}
    made = [build([3, 1, 0, 4], [20, 9, 5, 4], seed=3, **given) for _ in range(2)]  # type: ignore[arg-type]
    angles = torch.arange(64)[:, None] * torch.rand(max(1, turned // 2), generator=torch.Generator().manual_seed(1))
    rotary = tw.rotary(angles.cos(), angles.sin(), interleaved=interleaved) if turned else None
    g = torch.Generator().manual_seed(2)
    k, v = (torch.randn(8, 2, n, generator=g).to(dtype) for n in (32, 24))
    outs = []
    for one, backend in zip(made, ("tiled", "triton"), strict=True):
        dispatch.pages_writer = (lambda *_: None) if backend == "tiled" else WRITER
        outs.append(tw.attention_cached(one.q, one.cache, new=(k, v), rotary=rotary, cu_seqlens_q=one.cu, backend=backend))
    step = torch.finfo(dtype).eps * (1 if stored is None else 4096)
    for one, other in zip(made[0].pages, made[1].pages, strict=True):
        one, other = ((x.view(torch.uint8) if x.element_size() == 1 and x.dtype != torch.int8 else x) for x in (one, other))
        equal = torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0)) if one.is_floating_point() else torch.equal(one, other)
        if not equal:
            apart = (one.float().nan_to_num(9.0) - other.float().nan_to_num(9.0)).abs()
            assert turned and bool((apart <= (1 if stored else step * one.float().nan_to_num(9.0).abs())).all()), "pages differ"
    assert torch.allclose(outs[0].float(), outs[1].float(), atol=4 * step, rtol=4 * step), "outputs differ"


WRITER = dispatch.pages_writer
WRITES: dict[str, Any] = {
    "append": (False, 0, 16, torch.float32, None),
    "append int8": (False, 0, 3, torch.float32, torch.int8),
    "append float8": (False, 0, 8, torch.bfloat16, torch.float8_e4m3fn),
    "append and turn": (False, 32, 16, torch.bfloat16, None),
    "append and turn some": (False, 20, 5, torch.float32, None),
    "append and turn neighbours": (True, 20, 5, torch.float16, torch.int8),
}


def main() -> int:
    checks: dict[str, Callable[[], None]] = {}
    for name in (*CASES, *OPTIONS):
        if name not in LEFT_OUT:
            checks[name] = partial(conform, name)
    checks |= {name: partial(turned_and_written, *how) for name, how in WRITES.items()}
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
