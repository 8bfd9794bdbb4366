"""The tokens of a batch as context parallelism divides them: which of them are real, and where sequences begin.

Rows that are whole sequences stay rows, and every rank holds a part of each. A batch with padding, or with several sequences in
a row, becomes one row of all real tokens with the lengths of the sequences beside it: padding is neither computed nor sent.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError


class Tokens(NamedTuple):
    """The batch as the caller gave it, (batch, length), and as it is planned."""

    batch: int
    length: int
    lengths: tuple[int, ...] | None = None
    """Of the sequences packed one after another in one row; None if every row is a sequence."""
    kept: Tensor | None = None
    """Which of the batch × length tokens are real, in order; None if all are."""

    def pack(self, x: Tensor) -> Tensor:
        """From (batch, length, …) to the planned layout: the same, or (1, tokens, …)."""
        if self.lengths is None:
            return x
        flat = x.expand(self.batch, *x.shape[1:]).reshape(self.batch * self.length, *x.shape[2:])
        return (flat if self.kept is None else flat[self.kept.to(x.device)])[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Back again; padding is 0."""
        if self.lengths is None:
            return x
        flat = x[0]
        if self.kept is not None:
            whole = flat.new_zeros(self.batch * self.length, *flat.shape[1:])
            flat = whole.index_copy(0, self.kept.to(x.device), flat)
        return flat.reshape(self.batch, self.length, *flat.shape[1:])


def read_tokens(batch: int, length: int, inputs: dict[str, Any]) -> Tokens:
    """The tokens of a forward, from `cu_seq_lens_q`, `attention_mask` or `position_ids`, whichever says so first.

    As in transformers, position ids that start again begin a new sequence only where no mask is given.
    """
    bounds, mask, positions = (inputs.get(name) for name in ("cu_seq_lens_q", "attention_mask", "position_ids"))
    if bounds is not None:
        return Tokens(batch, length, _bounded(bounds, inputs.get("cu_seq_lens_k"), mask, batch, length))
    if mask is not None:
        return _padded(mask, batch, length)
    if positions is not None:
        lengths = _restarts(positions, batch, length)
        return Tokens(batch, length, lengths if len(lengths) > batch else None)
    return Tokens(batch, length)


def _bounded(bounds: Tensor, keys: Tensor | None, mask: Any, batch: int, length: int) -> tuple[int, ...]:
    if batch != 1 or mask is not None:
        raise ArgumentError(
            f"cu_seq_lens_q: given for a batch of {batch}{'' if mask is None else ' with an attention_mask'}, need one row that "
            "holds all sequences, and no mask"
        )
    if bounds.ndim != 1 or (keys is not None and not torch.equal(bounds.cpu(), keys.cpu())):
        raise ArgumentError(
            f"cu_seq_lens_k: {keys} differs from cu_seq_lens_q, {bounds}; context parallelism is for self-attention, where "
            "queries and keys are the same tokens"
        )
    values = bounds.tolist()
    lengths = tuple(after - before for before, after in pairwise(values))
    if values[:1] != [0] or values[-1] != length or min(lengths, default=0) < 0:
        raise ArgumentError(f"cu_seq_lens_q: {values}, need bounds that rise from 0 to {length}, the tokens of the row")
    return tuple(n for n in lengths if n)


def _padded(mask: Any, batch: int, length: int) -> Tokens:
    if isinstance(mask, dict) or mask.ndim != 2:
        got = "a dict" if isinstance(mask, dict) else f"shape {tuple(mask.shape)}"
        raise LayoutError(
            f"attention_mask: {got}, need (batch, tokens) with 0 for padding; context parallelism plans its communication from "
            "the masks of the model's layers, and takes none of Sq × Sk elements"
        )
    if tuple(mask.shape) != (batch, length):
        raise LayoutError(f"attention_mask: shape {tuple(mask.shape)}, need {(batch, length)}, as the tokens have it")
    real = mask.detach().bool().cpu()
    counts = real.sum(-1)
    if bool(real.all()):
        return Tokens(batch, length)
    ends = length - real.flip(-1).int().argmax(-1)
    spans = torch.where(counts > 0, ends - real.int().argmax(-1), 0)
    holes = (spans != counts).nonzero().flatten().tolist()
    if holes:
        raise ArgumentError(
            f"attention_mask: rows {holes} have padding between real tokens, need it at the ends of a row, left or right"
        )
    lengths = tuple(n for n in counts.tolist() if n)
    if not lengths:
        raise ArgumentError("attention_mask: all tokens are padding, need at least one that is not")
    return Tokens(batch, length, lengths, real.flatten().nonzero().flatten())


def _restarts(positions: Tensor, batch: int, length: int) -> tuple[int, ...]:
    """The lengths of the sequences in all rows: a position that is not the one before plus 1 begins a new one."""
    check_positions(positions, batch, length)
    steps = positions.detach().cpu().expand(batch, -1).diff(dim=-1) != 1
    starts = torch.nn.functional.pad(steps, (1, 0), value=True).flatten().nonzero().flatten()
    ends = torch.nn.functional.pad(starts[1:], (0, 1), value=batch * length)
    return tuple((ends - starts).tolist())


def check_positions(positions: Tensor, batch: int, length: int) -> None:
    if positions.is_floating_point() or positions.ndim != 2:
        raise ArgumentTypeError(
            f"position_ids: {positions.dtype} of shape {tuple(positions.shape)}, need integers (batch or 1, tokens); those of "
            "several dimensions are not served under context parallelism"
        )
    if positions.shape[0] not in (1, batch) or positions.shape[1] != length:
        raise LayoutError(f"position_ids: shape {tuple(positions.shape)}, need {(batch, length)} or {(1, length)}")
