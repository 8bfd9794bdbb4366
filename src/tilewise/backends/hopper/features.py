"""Features beside the mask that the kernels have: which of them are served, and what kernels are compiled for. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from tilewise.backends.hopper.intervals import IntervalMask
from tilewise.problem import Problem

SWITCH = "TILEWISE_HOPPER_FEATURES"
"""Set to 1, the environment variable lets these kernels serve the features in SWITCHED. Not yet timed on a GPU: without it other
backends serve them."""
SWITCHED = frozenset({"sinks", "alibi", "dropout"})


def features_of(problem: Problem) -> Iterator[str]:
    """The names of the features that a problem has."""
    asked = {
        "bias": problem.bias is not None,
        "alibi": problem.alibi,
        "sinks": problem.sinks,
        "dropout": problem.dropout_p > 0,
    }
    return (name for name, is_asked in asked.items() if is_asked)


def feature_obstacles(problem: Problem) -> Iterator[str]:
    """A sentence for each feature that is not served."""
    served = SWITCHED if os.environ.get(SWITCH) == "1" else frozenset()
    for name in features_of(problem):
        if name not in served:
            yield f"{name} is not served here"
        elif name in ("alibi", "dropout") and problem.origins:
            yield f"{name} is not served here for a part of a whole"


def alibi_form(problem: Problem, mask: IntervalMask) -> str:
    """What `Config.ALIBI` says: "past" where the mask surely shows no key ahead of its query, as ALiBi counts."""
    if not problem.alibi:
        return ""
    known = bool(mask.terms) and all(term.off is None for term in mask.terms) and (mask.bottom or not problem.varlen)
    ahead = 0 if problem.varlen else problem.seqlen_k - problem.seqlen_q
    return "past" if known and all(term.past <= ahead + 1 for term in mask.terms) else "both"


def feature_types(problem: Problem) -> dict[str, Any]:
    """Arguments of every kernel over work tiles, types in place of addresses."""
    found: dict[str, Any] = {}
    if problem.alibi:
        found |= {"alibi_ptr": "*fp32", "alibi_b": 0}
    if problem.dropout_p > 0:
        below = int(problem.dropout_p * 2**32)  # as numerics.philox has it
        found |= {"seed_ptr": "*i32", "drop_below": below - (1 << 32) if below >= 1 << 31 else below}
        found |= {"keep_scale": 1.0 / (1.0 - problem.dropout_p)}
    return found


def prepost_types(problem: Problem) -> dict[str, Any]:
    """Arguments of the backward's preprocess kernel."""
    return {"sinks_ptr": "*fp32", "dsinks_ptr": "*fp32"} if problem.sinks else {}
