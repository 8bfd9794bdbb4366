"""JVP and double backward of the Triton backend in Triton's interpreter, as a program of its own.

    TRITON_INTERPRET=1 python -m tests.backends.interpreted_derivatives [names of cases]
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace

from tests.conformance.cases import BY_NAME, CASES, Built, Case, build
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


def hidden_by_bias() -> Built:
    """A key that the bias hides from all queries, and a query that sees no key, which may hold anything."""
    built = build(Case("", batch=1, heads=2, kv_heads=1, seqlen=20, head_dim=8, bias=(1, -1, -1, -1), softcap=3.0))
    q, k, v, bias = (x.detach() for x in built.inputs[:4] if x is not None)
    k[:, :, 5], v[:, :, 5], q[:, :, 3] = float("inf"), float("nan"), float("inf")
    bias[..., 5], bias[:, :, 3] = float("-inf"), float("-inf")
    return built


def built_of(name: str) -> Built:
    if name == "hidden-by-bias":
        return hidden_by_bias()
    case = BY_NAME[name]
    if case.lengths is None:
        case = replace(case, batch=1, seqlen=min(case.seqlen, 37), kv_seqlen=case.kv_seqlen and min(case.kv_seqlen, 50))
    return build(case)


def main() -> int:
    failed = 0
    for name in sys.argv[1:] or (*(served() if os.environ.get("TILEWISE_FUZZ") else NAMES), "hidden-by-bias"):
        built = built_of(name)
        assert dispatch.judge("triton", built.problem, derivative="jvp").ok, name
        assert dispatch.judge("triton", built.problem, derivative="double_backward").ok, name
        excesses = second.derivatives(built.problem, built.inputs, "triton")
        failed += bool(excesses)
        print(name, "; ".join(map(str, excesses)) or "ok", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
