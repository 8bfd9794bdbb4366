"""JVP and double backward of the Triton backend in Triton's interpreter, as a program of its own.

    TRITON_INTERPRET=1 python -m tests.backends.interpreted_derivatives [names of cases]
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace

from tests.conformance.cases import BY_NAME, build
from tests.numerics import second
from tilewise import dispatch

NAMES = (
    *("mask-causal-window", "mask-documents", "cross-prefix-lm", "gqa", "softcap", "sinks", "dropout", "alibi"),
    *("dtype-bfloat16", "value-dim-larger", "varlen-padding", "bias-1xxx", "mask-nothing"),
)


def main() -> int:
    failed = 0
    for name in sys.argv[1:] or NAMES:
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
