"""Statistics of the Triton backend, and the entropy's gradient, in Triton's interpreter, as a program of its own.

    TRITON_INTERPRET=1 python -m tests.backends.interpreted_statistics [names of cases]
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace

import torch

import tilewise as tw
from tests.api.test_statistics import check_top
from tests.conformance.cases import BY_NAME, Built, build
from tilewise import dispatch
from tilewise.backends.base import Inputs
from tilewise.numerics import bounds, oracle, statistics

STATS = ("max_logit", "entropy", "key_mass")
NAMES = ("mask-causal-window", "gqa", "sinks-empty-rows", "dtype-bfloat16", "varlen-padding", "bias-1xxx")
MORE = (
    *("plain", "mask-documents", "softcap", "dropout", "alibi", "value-dim-larger", "mask-nothing", "huge-logits", "decode"),
)
"""With TILEWISE_FUZZ: each takes seconds."""


def excesses(built: Built) -> dict[str, float]:
    """Errors over their bounds, of what is more than 1."""
    out, lse, stats = built.call("triton", stats=(*STATS, tw.top(5)))  # type: ignore[misc]
    inputs = Inputs(*(None if x is None else x.detach() for x in built.inputs))  # type: ignore[arg-type]
    exact, bound = statistics.exact(built.problem, inputs), statistics.bounds(built.problem, inputs)
    found = {}
    for name in STATS:
        own = getattr(stats, name)
        own = own if built.packed is None else own.unsqueeze(0)
        found[name] = bounds.ratios(own, getattr(exact, name), getattr(bound, name)).max().item()
    top = [x if built.packed is None else x.unsqueeze(0) for x in stats.top]
    check_top(*top, exact.weights, bound.weights)
    true_out, true_lse = oracle.oracle(built.problem, inputs)
    slack_out, slack_lse = bounds.forward(built.problem, inputs)
    if built.packed is not None:  # (T, H, D) and (H, T)
        out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    found["out"] = bounds.ratios(out, true_out, slack_out).max().item()
    found["lse"] = bounds.ratios(lse, true_lse, slack_lse).max().item()
    dentropy = torch.randn(exact.entropy.shape, generator=torch.Generator().manual_seed(3)).to(out.device)
    leaves = {"q": built.q, "k": built.k}
    if built.problem.bias is not None:
        leaves["bias"] = built.options["bias"]
    grads = torch.autograd.grad(
        stats.entropy, list(leaves.values()), dentropy if built.packed is None else dentropy.squeeze(0)
    )
    true = statistics.entropy_gradients(built.problem, inputs, dentropy)
    slack = statistics.entropy_gradient_bounds(built.problem, inputs, dentropy)
    for name, grad in zip(leaves, grads, strict=True):
        own = grad if built.packed is None or name == "bias" else grad.transpose(0, 1).unsqueeze(0)
        found[f"d{name}"] = bounds.ratios(own, true[name], slack[name]).max().item()
    return {name: ratio for name, ratio in found.items() if not ratio <= 1}


def main() -> int:
    failed = 0
    for name in sys.argv[1:] or (*NAMES, *(MORE if os.environ.get("TILEWISE_FUZZ") else ())):
        case = BY_NAME[name]
        if case.lengths is None:
            case = replace(case, batch=1, seqlen=min(case.seqlen, 34), kv_seqlen=case.kv_seqlen and min(case.kv_seqlen, 40))
        built = build(case)
        assert dispatch.judge("triton", replace(built.problem, stats=(*STATS, "top(5)"))).ok, name
        found = excesses(built)
        failed += bool(found)
        print(name, found or "ok", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
