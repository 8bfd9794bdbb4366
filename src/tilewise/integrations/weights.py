"""The N × N weights that some callers ask for: from a second pass over tiles of rows, so they are formed only then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.api.parse import parse_call
from tilewise.backends.sequence import SequenceView, sequences
from tilewise.masks import TileClass
from tilewise.numerics.merge import softmax_with_sink

ROWS = 256
"""Queries of a tile."""


class Weights(NamedTuple):
    """[B, H, M, N] each, differentiable; 0 where masked."""

    before: Tensor  # before dropout
    after: Tensor  # after dropout: kept ones are divided by the probability of being kept


def attention_weights(q: Tensor, k: Tensor, options: dict[str, Any]) -> Iterator[Weights]:
    """The weights of the call with these options, for each sequence or all at once, in order. A row that sees nothing is 0."""
    problem, inputs = parse_call(q, k, k, options, needs_seed=True)  # type: ignore[arg-type]  # options of `attention`
    for seq in sequences(problem, inputs):
        tiles = [_tile(seq, (lo, min(lo + ROWS, seq.seqlen_q))) for lo in range(0, max(1, seq.seqlen_q), ROWS)]
        yield Weights(*(torch.cat(parts, dim=2).to(q.dtype) for parts in zip(*tiles, strict=True)))


def _tile(seq: SequenceView, rows: tuple[int, int]) -> Weights:
    keys = (0, seq.seqlen_k)
    s = seq.scores(seq.load(seq.inputs.q, rows), rows, keys, TileClass.PARTIAL).s  # [B, H, M, N]
    p, _, _ = softmax_with_sink(s, seq.inputs.sinks)
    return Weights(p, seq.dropped(p, rows, keys))
