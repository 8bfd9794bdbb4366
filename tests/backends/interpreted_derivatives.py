"""JVP and double backward of the Triton backend in Triton's interpreter, as a program of its own.

    TRITON_INTERPRET=1 python -m tests.backends.interpreted_derivatives [names of cases]
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace

from tests.conformance.cases import BY_NAME, CASES, build
from tests.numerics import second
from tilewise import dispatch
from tilewise.ops.run import is_empty

NAMES = (
    *("mask-causal-window", "mask-documents", "cross-prefix-lm", "gqa", "softcap", "sinks", "dropout", "alibi"),
    *("dtype-bfloat16", "value-dim-larger", "varlen-padding", "bias-1xxx", "mask-nothing"),
)


def served() -> list[str]:
    """Every small case that has a JVP: with TILEWISE_FUZZ, since each takes seconds."""
    small = [case for case in CASES if max(case.seqlen, case.kv_seqlen or 0) <= 90 and case.head_dim <= 64]
    problems = {case.name: build(case).problem for case in small}
    return [name for name, p in problems.items() if not is_empty(p) and dispatch.judge("triton", p, derivative="jvp").ok]


def main() -> int:
    failed = 0
    for name in sys.argv[1:] or (served() if os.environ.get("TILEWISE_FUZZ") else NAMES):
        case = BY_NAME[name]
        if case.lengths is None:
            case = replace(case, batch=1, seqlen=min(case.seqlen, 37), kv_seqlen=case.kv_seqlen and min(case.kv_seqlen, 50))
        built = build(case)
        assert dispatch.judge("triton", built.problem, derivative="jvp").ok, name
        whole = dispatch.judge("triton", built.problem, derivative="double_backward").ok
        assert whole or built.problem.bias is not None, name
        excesses = second.derivatives(built.problem, built.inputs, "triton", jvp_only=not whole)
        failed += bool(excesses)
        print(name, "; ".join(map(str, excesses)) or "ok", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
