"""torch.func.vmap: the mapped dimension becomes part of the batch or of the heads; where neither can hold it, calls run in turn.

A batch holds it unless something without a batch side, the sinks, is mapped or has a gradient of its own in every sample; then
the heads do. Calls run one by one, with a warning that says why,
- with dropout, whose mask counts sequences and heads,
- for packed batches, and for parts of a whole, whose origins count sequences,
- where the heads would have to hold it and the mask's tensors are mapped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, Tangents
from tilewise.masks import Lowered, MaskProgram
from tilewise.ops.tensors import tensor_fields
from tilewise.problem import Problem

BODY, BIAS, SLOPES, SINKS, MASK, OTHER = "body", "bias", "slopes", "sinks", "mask", "other"
"""How a tensor holds batch and heads: BODY as (B, H, …), BIAS and SLOPES the same with sides of 1, SINKS as (H,)."""
BATCH, HEADS = 0, 1
KINDS = {
    "inputs": (BODY, BODY, BODY, BIAS, SLOPES, SINKS, OTHER, OTHER, OTHER, OTHER),
    "tangents": (BODY, BODY, BODY, BIAS, SINKS),
    "upstream": (BODY, BODY),
    "results": (BODY, BODY),
}
assert len(KINDS["inputs"]) == len(Inputs._fields) and len(KINDS["tangents"]) == len(Tangents._fields)
RESULTS = KINDS["results"]


class Roles(tuple[str, ...]):
    """The kinds of a function's tensors, and where the Inputs are among them."""

    inputs: int


def roles(*groups: str, mask: int) -> Roles:
    """The kinds of tensors that come in these groups; the mask has so many, and comes last."""
    kinds: list[str] = []
    first = 0
    for group in groups:
        first = len(kinds) if group == "inputs" else first
        kinds += (MASK,) * mask if group == "mask" else KINDS[group]
    found = Roles(kinds)
    found.inputs = first
    return found


def gradients(needs: Sequence[bool]) -> tuple[str, ...]:
    """The kinds of the gradients that are needed."""
    return tuple(kind for kind, need in zip(KINDS["tangents"], needs, strict=True) if need)


class Fold:
    """A call of which some tensors have one more dimension, `size` long, at `dims`."""

    def __init__(
        self,
        problem: Problem,
        size: int,
        kinds: Roles,
        dims: Sequence[int | None],
        tensors: Sequence[Tensor | None],
        needs: Sequence[bool] = (),
    ) -> None:
        self.problem, self.size, self.kinds, self.dims, self.tensors = problem, size, kinds, dims, tensors
        _, _, _, dbias, dsinks = needs or (False,) * 5
        mapped = {kind for kind, dim in zip(kinds, dims, strict=True) if dim is not None}
        self.each_bias = dbias or BIAS in mapped
        self.each_sink = dsinks or SINKS in mapped
        self.axis = HEADS if self.each_sink else BATCH
        self.reason = self._obstacle(mapped)
        literals = [literal for term in problem.program.terms() for literal in term]
        self.per_head = [literal.kind.per_head for literal in literals for _ in literal.tensors]

    def _obstacle(self, mapped: set[str]) -> str | None:
        """Why neither batch nor heads can hold the mapped dimension."""
        if self.problem.dropout_p:
            return "dropout's mask counts sequences and heads"
        if self.problem.varlen:
            return "packed batches are not joined"
        if self.tensors[self.kinds.inputs + Inputs._fields.index("origins")] is not None:
            return "parts of a whole are not joined"
        if self.axis == HEADS and MASK in mapped:
            return "sinks want the heads to hold the mapped dimension, and the mask's tensors the batch"
        return None

    def run(self, call: Callable[[Problem, Sequence[Any]], Sequence[Tensor]], kinds: Sequence[str]) -> tuple[Any, Any]:
        """The results of `call`, whose tensors are of these `kinds`, and the places of their mapped dimension."""
        if self.reason is not None:
            warnings.warn(f"vmap runs attention {self.size} times, one by one: {self.reason}", RuntimeWarning, stacklevel=2)
            parts = [call(self.problem, self._sample(i)) for i in range(self.size)]
            return tuple(torch.stack(each) for each in zip(*parts, strict=True)), (0,) * len(kinds)
        tensors = self._folded()
        results = call(self._folded_problem(tensors), tensors)
        return tuple(map(self._unfolded, results, kinds)), (0,) * len(kinds)

    def _sample(self, i: int) -> list[Tensor | None]:
        pairs = zip(self.tensors, self.dims, strict=True)
        return [x if x is None or dim is None else x.select(dim, i) for x, dim in pairs]

    def _folded(self) -> list[Tensor | None]:
        place, folded = 0, []
        for x, kind, dim in zip(self.tensors, self.kinds, self.dims, strict=True):
            if x is None or kind == OTHER:
                folded.append(x)
                continue
            each = kind == BODY or dim is not None or (kind == BIAS and self.each_bias)
            has_side = True
            if kind == MASK:
                has_side = self.axis == BATCH or self.per_head[place]
                place += 1
            elif kind == SINKS:
                has_side = each = self.each_sink
            axis = BATCH if kind == SINKS else self.axis
            folded.append(self._tensor(x, dim, axis, kind, each) if has_side else x)
        return folded

    def _tensor(self, x: Tensor, dim: int | None, axis: int, kind: str, each: bool) -> Tensor:
        """x with the mapped dimension in front of side `axis`, and both as one; a side of 1 that all share stays."""
        mapped = x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)
        side = mapped.shape[axis + 1]
        if not each and side == 1:
            return x
        if kind in (BIAS, SLOPES, MASK):
            full = self.problem.heads if axis == HEADS else self.problem.batch
            mapped = mapped.expand(*mapped.shape[: axis + 1], full, *mapped.shape[axis + 2 :])
        return mapped.movedim(0, axis).flatten(axis, axis + 1)

    def _folded_problem(self, tensors: Sequence[Tensor | None]) -> Problem:
        first = self.kinds.inputs
        inputs = Inputs(*tensors[first : first + len(Inputs._fields)])  # type: ignore[arg-type]
        mask = tuple(x for x, kind in zip(tensors, self.kinds, strict=True) if kind == MASK)
        program = self.problem.program
        lowered = Lowered(MaskProgram(program.structure, program.ints, mask)) if mask else self.problem.mask
        return replace(self.problem, **tensor_fields(inputs), mask=lowered)

    def _unfolded(self, x: Tensor, kind: str) -> Tensor:
        """A result with the mapped dimension in front."""
        axis = BATCH if kind == SINKS else self.axis
        apart: Tensor = x.unflatten(axis, (self.size, -1)).movedim(axis, 0)
        if kind != BIAS or self.problem.bias is None:
            return apart
        return apart.sum_to_size(self.size, *self.problem.bias)
