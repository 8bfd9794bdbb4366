"""Features beside the mask that the kernels have: which of them are served, and what kernels are compiled for. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from tilewise.backends.hopper.intervals import IntervalMask, interval_mask
from tilewise.backends.hopper.structs import Unaligned
from tilewise.problem import Problem

SWITCH = "TILEWISE_HOPPER_FEATURES"
"""Set to 1, the environment variable lets these kernels serve the features in SWITCHED. Not yet timed on a GPU: without it other
backends serve them."""
SWITCHED = frozenset({"sinks", "alibi", "dropout", "bias"})
ELEMENT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""Numbers of a bias."""


def features_of(problem: Problem) -> Iterator[str]:
    """The names of the features that a problem has."""
    asked = {
        "bias": problem.bias is not None,
        "alibi": problem.alibi,
        "sinks": problem.sinks,
        "dropout": problem.dropout_p > 0,
    }
    return (name for name, is_asked in asked.items() if is_asked)


def feature_obstacles(problem: Problem, backward: bool = False) -> Iterator[str]:
    """A sentence for each feature that is not served."""
    served = SWITCHED if os.environ.get(SWITCH) == "1" else frozenset()
    for name in features_of(problem):
        if name not in served:
            yield f"{name} is not served here"
        elif name in ("alibi", "dropout") and problem.origins:
            yield f"{name} is not served here for a part of a whole"
        elif name == "bias":
            yield from bias_obstacles(problem, backward)


def bias_obstacles(problem: Problem, backward: bool) -> Iterator[str]:
    if problem.alibi:
        yield "a bias is not served here beside ALiBi"
    if isinstance(interval_mask(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen), str):
        yield "a bias is not served here under a mask of tile lists"
    if backward and problem.deterministic and is_broadcast(problem):
        yield "deterministic=True is not served here with a bias that is broadcast: its gradient is added up in any order"


def is_broadcast(problem: Problem) -> bool:
    """Is some number of the bias added to several scores?"""
    sides = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    return problem.bias is not None and any(size == 1 < side for size, side in zip(problem.bias, sides, strict=True))


def bias_form(problem: Problem) -> str:
    """What `Config.BIAS` says of a contiguous bias in the problem's dtype; a call's own may be another."""
    if problem.bias is None:
        return ""
    return ELEMENT.get(problem.dtype, "fp32") + ("x2" if problem.bias[3] % 2 == 0 else "")


def alibi_form(problem: Problem, mask: IntervalMask) -> str:
    """What `Config.ALIBI` says: "past" where the mask surely shows no key ahead of its query, as ALiBi counts."""
    if not problem.alibi:
        return ""
    known = bool(mask.terms) and all(term.off is None for term in mask.terms) and (mask.bottom or not problem.varlen)
    ahead = 0 if problem.varlen else problem.seqlen_k - problem.seqlen_q
    return "past" if known and all(term.past <= ahead + 1 for term in mask.terms) else "both"


def feature_types(problem: Problem, bias: str = "") -> dict[str, Any]:
    """Arguments of every kernel over work tiles, types in place of addresses; `bias`: its form."""
    found: dict[str, Any] = bias_types(bias) if bias else {}
    if problem.alibi:
        found |= {"alibi_ptr": "*fp32", "alibi_b": 0}
    if problem.dropout_p > 0:
        below = int(problem.dropout_p * 2**32)  # as numerics.philox has it
        found |= {"seed_ptr": "*i32", "drop_below": below - (1 << 32) if below >= 1 << 31 else below}
        found |= {"keep_scale": 1.0 / (1.0 - problem.dropout_p)}
    return found


def bias_types(form: str) -> dict[str, Any]:
    """Arguments that read a bias."""
    paired = form.endswith("x2")
    strides = {"bias_b": Unaligned("i64"), "bias_h": Unaligned("i64"), "bias_q": 0, "bias_k": None if paired else 0}
    return {"bias_ptr": Unaligned("*i32" if paired else f"*{form}"), **strides, "bias_rows": 0, "bias_keys": 0}


def gradient_form(problem: Problem) -> str:
    """What `QueriesConfig.DBIAS` says where the gradient of the bias is wanted."""
    if problem.bias is None:
        return ""
    if not is_broadcast(problem):
        return "store"
    return "add keys" if problem.bias[3] == 1 < problem.seqlen_k else "add"


class BiasForm(NamedTuple):
    """Of a call's bias: what `BIAS` and `DBIAS` of the configs say."""

    numbers: str
    gradient: str


def gradient_types(gradient: str, form: str) -> dict[str, Any]:
    """Arguments that write the gradient of a bias."""
    if not gradient:
        return {}
    strides = {"dbias_b": Unaligned("i64"), "dbias_h": Unaligned("i64"), "dbias_q": 0}
    if gradient == "store":
        return {"dbias_ptr": f"*{form.removesuffix('x2')}", **strides}
    return {"dbias_ptr": "*fp32", **strides, "dbias_k": 0 if gradient == "add keys" else None}


def prepost_types(problem: Problem) -> dict[str, Any]:
    """Arguments of the backward's preprocess kernel."""
    return {"sinks_ptr": "*fp32", "dsinks_ptr": "*fp32"} if problem.sinks else {}
