"""Packed batches: the cumulative lengths are data, so they are checked where they are read, also under torch.compile.

So is what depends on them: a bias, a table of blocks and lists of them must reach as far as the longest sequence.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.errors import ArgumentError, LayoutError, MaskError
from tilewise.ops.tensors import checks_values
from tilewise.problem import Problem


def check_packing(problem: Problem, inputs: Inputs) -> None:
    """Raise on cumulative lengths that do not fit their tokens, and on a bias or blocks that do not cover them.

    Only where values are looked at (`checks_values`); kernels clamp.
    """
    if not checks_values(inputs.q.device):
        return
    assert inputs.cu_q is not None and inputs.cu_k is not None
    literals = [literal for term in problem.program.terms() for literal in term]
    ends = (("cu_seqlens_q", inputs.cu_q, inputs.q), ("cu_seqlens_k", inputs.cu_k, inputs.k))
    for side, (name, cu, x) in enumerate(ends):
        longest, axis = _longest(name, cu, x.shape[-2 if x.ndim == 4 else 0]), ("queries", "keys")[side]
        if inputs.bias is not None and 1 != inputs.bias.shape[2 + side] < longest:
            got = inputs.bias.shape[2 + side]
            raise LayoutError(
                f"bias: {got} along {axis}, but the longest sequence has {longest}; need 1 or at least that"
            )
        for kind, sizes, tensors in literals:
            if not (kind.is_blocks or (kind.is_selected and side == 0)):
                continue
            got, name = tensors[0].shape[2 + side], "blocks: table has" if kind.is_blocks else "selected: indices covers"
            if got * sizes[side] < longest:
                raise MaskError(
                    f"{name} {got} blocks of {sizes[side]} {axis}, but the longest sequence has {longest}; "
                    f"need at least {-(-longest // sizes[side])} blocks"
                )


def _longest(name: str, cu: Tensor, tokens: int) -> int:
    values = cu.tolist()
    if values[0] != 0:
        raise ArgumentError(f"{name}: starts with {values[0]}, need 0")
    longest = 0
    for i, (start, end) in enumerate(pairwise(values)):
        longest = max(longest, end - start)
        if end < start:
            raise ArgumentError(
                f"{name}: falls from {start} to {end} at position {i + 1}; cumulative lengths never fall"
            )
    if values[-1] != tokens:
        raise ArgumentError(f"{name}: ends with {values[-1]}, but there are {tokens} tokens")
    return longest
