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
from tilewise import dispatch


def failure(case: Case) -> str:
    """What is wrong with a case; empty if nothing is."""
    built = build(case, "cpu")
    if reasons := serves(built, "triton"):
        return "" if case.dtype.itemsize == 8 or case.precision == "compensated" else f"refused: {reasons}"
    return "; ".join(map(str, excesses(built, "triton", lse_gradient=case.lse_gradient)))


def main() -> int:
    if "triton" not in dispatch.REGISTRY:
        dispatch.register("triton", dispatch.Entry("tilewise.backends.triton", ("cpu", "cuda")))
    if sys.argv[1].isdigit():
        cases = CASES[int(sys.argv[1]) :: int(sys.argv[2])]
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
