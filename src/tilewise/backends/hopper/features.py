"""Features beside the mask that the kernels have: which of them are served, and what kernels are compiled for. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from tilewise.problem import Problem

SWITCH = "TILEWISE_HOPPER_FEATURES"
"""Set to 1, the environment variable lets these kernels serve the features in SWITCHED. Not yet run on a GPU: without it other
backends serve them."""
SWITCHED = frozenset({"sinks"})


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
    return (f"{name} is not served here" for name in features_of(problem) if name not in served)


def forward_features(problem: Problem) -> dict[str, Any]:
    """What the forward is compiled for."""
    return {"SINKS": problem.sinks}


def forward_types(problem: Problem) -> dict[str, Any]:
    """Arguments of the forward, types in place of addresses."""
    return {"sinks_ptr": "*fp32" if problem.sinks else None}


def prepost_types(problem: Problem) -> dict[str, Any]:
    """Arguments of the backward's preprocess kernel."""
    return {"sinks_ptr": "*fp32", "dsinks_ptr": "*fp32"} if problem.sinks else {}
