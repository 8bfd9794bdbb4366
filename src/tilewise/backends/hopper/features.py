"""Features beside the mask: which the kernels serve, which they leave to others, what they are compiled for. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tilewise.backends.hopper.compiler import newer_registers
from tilewise.backends.hopper.intervals import IntervalMask, interval_mask, mask_of, unseen_keys
from tilewise.backends.hopper.structs import Unaligned
from tilewise.problem import Problem

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
    for name in features_of(problem):
        if name in ("alibi", "dropout") and problem.origins:
            yield f"{name} is not served here for a part of a whole"
        elif name == "bias":
            yield from bias_obstacles(problem, backward)


def slow_feature(problem: Problem, backward: bool = False) -> str | None:
    """Why other backends serve the problem's features better; None if they do not."""
    columns = max(problem.head_dim, problem.head_dim_v)
    if problem.dropout_p > 0 and columns <= 64 and not backward and not drawn_apart(problem):
        return "dropout takes longer here than in the portable kernels up to head dim 64"
    if problem.bias is not None and columns > 128:
        return "a bias finds no registers here beside more than 128 columns"
    return None


def in_quads(problem: Problem) -> bool:
    """Does dropout take keys in the order of `quads.py`? It has no ALiBi, bias, lists, packed batches and zeroing of values, and
    from Triton 3.8 on no name for the view of shared memory that its loads take."""
    if problem.dropout_p == 0 or problem.alibi or problem.bias is not None or problem.varlen or problem.origins:
        return False
    if drawn_apart(problem) or newer_registers() or problem.seqlen_k % 4 > 0 or max(problem.head_dim, problem.head_dim_v) > 128:
        return False
    mask = mask_of(problem)
    return not (mask.listed or unseen_keys(mask, problem.seqlen_q, problem.seqlen_k))


def drawn_apart(problem: Problem) -> bool:
    """Does a warpgroup of its own make the bits of dropout? At head dim 64 both find registers, where keys come in order."""
    if problem.dropout_p == 0 or problem.alibi or problem.bias is not None or problem.varlen or problem.origins:
        return False
    if max(problem.head_dim, problem.head_dim_v) > 64:
        return False
    mask = mask_of(problem)
    return not (mask.listed or unseen_keys(mask, problem.seqlen_q, problem.seqlen_k))


def bias_obstacles(problem: Problem, backward: bool) -> Iterator[str]:
    if problem.alibi:
        yield "a bias is not served here beside ALiBi"
    if isinstance(interval_mask(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen), str):
        yield "a bias is not served here under a mask of tile lists"
    if backward and problem.deterministic and is_broadcast(problem):
        yield "deterministic=True is not served here with a bias that is broadcast: its gradient is added up in any order"


def statistics_obstacle(problem: Problem, backward: bool) -> str | None:
    """Why statistics are not served; their largest logits and entropies are, and triton has the rest."""
    others = [name for name in problem.stats if name not in ("max_logit", "entropy")]
    if others:
        return f"stats: {', '.join(others)} is not served here"
    if problem.stats and (problem.alibi or problem.bias is not None):
        return "stats: not served here beside ALiBi or a bias"
    if backward and "entropy" in problem.stats:
        return "stats: the entropy has no gradient here"
    return None


def statistics_form(problem: Problem) -> str:
    """What `Config.STATS` says."""
    return "entropy" if "entropy" in problem.stats else "max" if problem.stats else ""


def statistics_types(problem: Problem) -> dict[str, str]:
    """Arguments that the forward writes statistics to; the largest logits are written always."""
    names = {"": (), "max": ("max_logit_ptr",), "entropy": ("max_logit_ptr", "entropy_ptr", "key_lse_ptr")}
    return dict.fromkeys(names[statistics_form(problem)], "*fp32")


def is_broadcast(problem: Problem) -> bool:
    """Is some number of the bias added to several scores?"""
    sides = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    return problem.bias is not None and any(size == 1 < side for size, side in zip(problem.bias, sides, strict=True))


def bias_form(problem: Problem) -> str:
    """What `Config.BIAS` says of a contiguous bias in the problem's dtype; a call's own may be another."""
    if problem.bias is None:
        return ""
    keys = problem.bias[3]
    return ELEMENT.get(problem.dtype, "fp32") + ("x2" if keys % 2 == 0 else "s" if keys == 1 else "")


def alibi_form(problem: Problem, mask: IntervalMask) -> str:
    """What `Config.ALIBI` says: "past" where the mask surely shows no key ahead of its query, as ALiBi counts."""
    if not problem.alibi:
        return ""
    known = bool(mask.terms) and all(term.off is None for term in mask.terms) and (mask.bottom or not problem.varlen)
    ahead = 0 if problem.varlen else problem.seqlen_k - problem.seqlen_q
    return "past" if known and all(term.past <= ahead + 1 for term in mask.terms) else "both"


def feature_types(problem: Problem, bias: str = "", mapped: bool = False) -> dict[str, Any]:
    """Arguments of every kernel over work tiles, types in place of addresses; `bias`: its form."""
    found: dict[str, Any] = bias_types(bias, mapped) if bias else {}
    if problem.alibi:
        found |= {"alibi_ptr": "*fp32", "alibi_b": 0}
    if problem.dropout_p > 0:
        below = int(problem.dropout_p * 2**32)  # as numerics.philox has it
        found |= {"seed_ptr": "*i32", "drop_below": below - (1 << 32) if below >= 1 << 31 else below}
        found |= {"keep_scale": 1.0 / (1.0 - problem.dropout_p)}
    return found


def number_of(form: str) -> str:
    """The type of the bias's numbers."""
    return form.removesuffix("x2").removesuffix("s")


def bias_types(form: str, mapped: bool = False) -> dict[str, Any]:
    """Arguments that read a bias; `mapped`: by a tensor map."""
    if mapped:
        return {"bias_b": 0, "bias_h": 0, "bias_flag": "*i32", "bias_again": 0}
    strides = {"bias_b": Unaligned("i64"), "bias_h": Unaligned("i64"), "bias_q": 0}
    strides |= {"bias_k": 0 if form.endswith("s") else None}
    numbers = Unaligned("*i32" if form.endswith("x2") else f"*{number_of(form)}")
    return {"bias_ptr": numbers, **strides, "bias_rows": 0, "bias_keys": 0, "bias_flag": "*i32", "bias_again": 0}


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
        return {"dbias_ptr": f"*{number_of(form)}", **strides}
    return {"dbias_ptr": "*fp32", **strides, "dbias_k": 0 if gradient == "add keys" else None}


def prepost_types(problem: Problem) -> dict[str, Any]:
    """Arguments of the backward's preprocess kernel."""
    return {"sinks_ptr": "*fp32", "dsinks_ptr": "*fp32"} if problem.sinks else {}
