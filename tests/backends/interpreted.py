"""Conformance of the Triton backend in Triton's interpreter, as a program of its own.

Whether a kernel is interpreted is decided when triton is imported, so this cannot share a process with compiling tests.

    TRITON_INTERPRET=1 python -m tests.backends.interpreted 0 4     every fourth case from the first
    TRITON_INTERPRET=1 python -m tests.backends.interpreted softcap the cases of that name
"""

from __future__ import annotations

import os
import sys
import time
import traceback

os.environ["TRITON_INTERPRET"] = "1"

from tests.conformance.cases import CASES, Case, build
from tests.conformance.harness import excesses, serves
from tilewise.backends.gpu import operands
from tilewise.backends.triton import plan, run

LEFT_OUT = {
    *(f"edge-{n}" for n in (15, 16, 31, 32, 63, 127, 128)),
    *(f"edge-keys-{n}" for n in (15, 16, 17, 31, 63, 65, 127, 129)),
    *(f"head-dim-{n}" for n in (3, 8, 64, 96, 512)),
    "dtype-float16-full",
    "dtype-bfloat16-full",
    "bias-1xxx",
    "bias-x11x",
}
"""Neighbours of cases that stay: the interpreter takes seconds for each. By name they run too."""
SPLIT = {
    *("plain", "mask-causal-window", "mask-causal-documents", "mask-dense", "cross-prefix-lm"),
    *("more-queries-key-padding", "edge-33", "edge-keys-17", "head-dim-1", "head-dim-24", "head-dim-80"),
    *("value-dim-larger", "decode", "sinks-empty-rows", "scale-negative", "lse-gradient", "huge-logits"),
    *("varlen-cross", "varlen-everything"),
}
"""fp32 cases that multiply in two fp16 parts, as NVIDIA's GPUs do; the others multiply whole numbers, as tf32 and AMD's GPUs
do. Parts take three times as long here."""


splits_fp32 = operands.splits_fp32


def failure(case: Case) -> str:
    """What is wrong with a case; empty if nothing is."""
    plan.splits_fp32 = run.splits_fp32 = splits_fp32 if case.name in SPLIT else lambda problem, hip: False
    built = build(case, "cpu")
    if reasons := serves(built, "triton"):
        return "" if case.dtype.itemsize == 8 or case.precision in ("compensated", "double") else f"refused: {reasons}"
    return "; ".join(map(str, excesses(built, "triton", lse_gradient=case.lse_gradient)))


def main() -> int:
    if sys.argv[1].isdigit():
        cases = [case for case in CASES if case.name not in LEFT_OUT][int(sys.argv[1]) :: int(sys.argv[2])]
    else:
        cases = [case for case in CASES if any(word in case.name for word in sys.argv[1:])]
    failed = 0
    for case in cases:
        start = time.perf_counter()
        try:
            why = failure(case)
        except Exception:
            why = traceback.format_exc(limit=-3)
        failed += bool(why)
        print(
            f"{case.name:28} {time.perf_counter() - start:5.1f} s  {'FAILED ' + why[-1500:] if why else 'ok'}",
            flush=True,
        )
    print(f"{len(cases)} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
