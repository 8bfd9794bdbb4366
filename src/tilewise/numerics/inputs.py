"""The tensors of one call, and its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from tilewise.masks import MaskProgram
from tilewise.problem import Origin, Problem


class Inputs(NamedTuple):
    """The tensors of one call, rank 4."""

    q: Tensor  # (B, Hq, M, D), or (1, Hq, T, D) packed
    k: Tensor  # (B, Hk, N, D)
    v: Tensor  # (B, Hk, N, Dv)
    bias: Tensor | None = None  # rank 4, each side 1 or full; added to the scores, -inf masks
    alibi: Tensor | None = None  # slopes, fp32 or fp64 like the lse (B or 1, Hq): score -= slope * |q + Sk - Sq - k|
    sinks: Tensor | None = None  # (Hq,): one more logit in each row's denominator
    seed: Tensor | None = None  # int64 scalar, the dropout key
    cu_q: Tensor | None = None  # int32 (B + 1,): where each packed sequence starts
    cu_k: Tensor | None = None
    origins: Tensor | None = None  # int32 (B, 4): where each sequence lies in a whole whose positions count; see Origin


class Span(NamedTuple):
    """One sequence of a call: where its tokens lie in q, k and v, and its own mask."""

    sequence: int
    batch: int  # index along the batch side of q, k and v
    q: slice
    k: slice
    program: MaskProgram

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q.stop - self.q.start, self.k.stop - self.k.start


def origin_of(inputs: Inputs, b: int) -> Origin | None:
    """Where sequence b begins in the whole; None where the call is the whole."""
    return None if inputs.origins is None else Origin(*inputs.origins[b].tolist())


def spans(problem: Problem, inputs: Inputs, sequences: Iterable[int]) -> Iterator[Span]:
    """The sequences with these numbers, of a plain or of a packed batch."""
    starts = [[] if cu is None else cu.tolist() for cu in (inputs.cu_q, inputs.cu_k)]
    for b in sequences:
        if problem.varlen:
            q, k = (slice(*cu[b : b + 2]) for cu in starts)
            yield Span(b, 0, q, k, problem.program.for_sequence(b, q.start, q.stop, k.start, k.stop))
        else:
            yield Span(b, b, slice(0, problem.seqlen_q), slice(0, problem.seqlen_k), problem.program)
