"""flash_attn's bert_padding: between padded batches (B, S, …) and the tokens in them, one after another (T, …)."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.errors import LayoutError


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of `input` named by `indices`; differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros of `first_axis_dim` rows, with `values` put at `indices`; differentiable."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch (B, S, …) that `attention_mask` (B, S) or `unused_mask` marks.

    Returns the tokens (T, …), their indices in the flattened batch, the cumulative lengths (B + 1,) int32, the longest length,
    and how many tokens of each sequence `attention_mask` itself marks. The longest length is a number, so a GPU is waited for.
    """
    if hidden_states.ndim < 2 or attention_mask.shape != hidden_states.shape[:2]:
        raise LayoutError(
            f"attention_mask: shape {tuple(attention_mask.shape)}, need the first two sides of hidden_states, "
            f"{tuple(hidden_states.shape[:2])}"
        )
    marked = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = marked.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(marked.flatten(), as_tuple=False).flatten()
    cumulative = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cumulative, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch (batch, seqlen, …) of tokens (T, …), zeros where there is none: the inverse of `unpad_input`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).reshape(batch, seqlen, *hidden_states.shape[1:])
