"""The tensors of features as the kernels read them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, rounded
from tilewise.problem import Problem

Features = dict[str, Any]
"""Arguments by name: tensors and numbers."""
NONE: Features = {}


def call_features(problem: Problem, inputs: Inputs) -> Features:
    """Of a call; empty for most."""
    if not (problem.sinks or problem.alibi or problem.dropout_p > 0):
        return NONE
    found: Features = {}
    if inputs.sinks is not None:
        found["sinks_ptr"] = inputs.sinks.to(torch.float32).contiguous()
    if inputs.alibi is not None:
        slopes = inputs.alibi.to(torch.float32).contiguous()
        found |= {"alibi_ptr": slopes, "alibi_b": problem.heads if slopes.shape[0] > 1 else 0}
    if problem.dropout_p > 0:
        assert inputs.seed is not None
        seed = inputs.seed.to(inputs.q.device, non_blocking=True)
        found["seed_ptr"] = seed.reshape(1).view(torch.int32)
    return found


def features_key(inputs: Inputs) -> Hashable:
    """What launches depend on beside the problem and the tensors' addresses."""
    return None if inputs.alibi is None else inputs.alibi.shape[0]


def tensors_in(features: Features) -> tuple[Tensor, ...]:
    return tuple(x for x in features.values() if isinstance(x, Tensor))


def with_features(arguments: Any, features: Features) -> Any:
    """A kernel's arguments with those that it takes."""
    return arguments._replace(**{name: x for name, x in features.items() if getattr(arguments, name, None) is not None})


def sink_gradient(parts: Tensor, sinks: Tensor, rows: int) -> Tensor:
    """The gradient of sinks from what each query adds, [rows of the batch · H · queries, padded]."""
    return rounded(parts.view(rows, sinks.shape[0], -1).sum(dim=(0, 2)), sinks.dtype)
