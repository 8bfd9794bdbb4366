"""FLOPs of the operators, for torch's FlopCounterMode: the matrix products over the pairs that the mask lets through.

Pairs are counted exactly, also for masks and packed batches whose tensors must be read for it. Where they cannot be read (fake
and meta tensors) every pair counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tilewise.backends.base import Inputs, Needs
from tilewise.backends.sequence import SequenceView, sequences
from tilewise.masks import TileClass, allowed
from tilewise.model.flops import visible_pairs
from tilewise.ops.tensors import PLAIN
from tilewise.problem import Problem

COUNTER = "torch.utils.flop_counter"


def forward_flops(problem: Problem, inputs: Inputs) -> int:
    """QKᵀ and PV."""
    return pairs(problem, inputs) * 2 * (problem.head_dim + problem.head_dim_v)


def backward_flops(problem: Problem, inputs: Inputs, needs: Needs) -> int:
    """QKᵀ again, dP = dO Vᵀ where scores have gradients, and a product for each of dQ, dK and dV that is wanted."""
    scores = needs.dq or needs.dk or needs.dbias
    columns = problem.head_dim * (1 + needs.dq + needs.dk) + problem.head_dim_v * (scores + needs.dv)
    return pairs(problem, inputs) * 2 * columns if scores or needs.dv else 0


def pairs(problem: Problem, inputs: Inputs) -> int:
    """Visible (query, key) pairs over all sequences and query heads."""
    readable = all(_readable(x) for x in (inputs.cu_q, inputs.cu_k, *problem.program.tensors))
    if not readable:
        return (1 if problem.varlen else problem.batch) * problem.heads * problem.seqlen_q * problem.seqlen_k
    if not problem.varlen and not problem.program.tensors:
        return visible_pairs(problem)
    return sum(map(_pairs, sequences(problem, inputs)))


def _readable(x: Tensor | None) -> bool:
    return x is None or (type(x) in PLAIN and not x.is_meta)


def _pairs(seq: SequenceView) -> int:
    total, batch, device = 0, seq.batch, seq.inputs.q.device
    for i, q in seq.query_blocks():
        for _, k, kind in seq.key_blocks(i):
            area = (q[1] - q[0]) * (k[1] - k[0])
            if kind is TileClass.FULL:
                total += batch * seq.heads * area
            else:
                tile = allowed(seq.program, seq.shape, q, k, lambda lo, hi: torch.arange(lo, hi, device=device))
                copies = batch * seq.heads * area // tile.numel()  # of what a mask without batch or heads says once
                total += int(tile.sum()) * copies
    return total


def teach_counters(formulas: dict[Any, Callable[..., int]]) -> None:
    """Tell torch's counters the operators' formulas, if anybody has imported them.

    A counter keeps those that were registered when it was made, so counters that run now are told too.
    """
    module = sys.modules.get(COUNTER)
    if module is None:
        return
    for operator, formula in formulas.items():
        if operator not in module.flop_registry:
            module.register_flop_formula(operator, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            for operator in formulas:
                registry.setdefault(operator, module.flop_registry[operator])
