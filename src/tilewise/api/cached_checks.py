"""What a call over a cache is refused for, all of it before the first write; and where the positions of its tokens are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.api.bias import Alibi
from tilewise.api.lengths import readable
from tilewise.backends.pages import Pages, positions_of
from tilewise.errors import ArgumentError, ArgumentTypeError, MaskError
from tilewise.masks import UNBOUNDED, Binding, Full, Literal, Lowered, Mask, MaskShape
from tilewise.masks.algebra import And, Band, Blocks, Dense, Documents, KeyRanges, Selected, Tree
from tilewise.masks.build import ANCHORS, is_integer
from tilewise.masks.trees import ancestors, check_parents, depths

MAX_SPLITS = 1024


def check_splits(splits: Any, invariant: Any) -> int:
    """So many, or 0 for as many as a backend likes."""
    if not isinstance(invariant, bool):
        raise ArgumentTypeError(f"invariant: got {invariant!r}, need True or False")
    if splits is None:
        return 0
    if not is_integer(splits):
        raise ArgumentTypeError(f"splits: got {splits!r}, need a positive integer, or None")
    if not 1 <= splits <= MAX_SPLITS:
        raise ArgumentError(f"splits: got {splits}, need 1 to {MAX_SPLITS}, or None")
    if invariant:
        raise ArgumentError("splits: with invariant=True keys are split at fixed positions; leave splits=None")
    return int(splits)


def check_mask(mask: Any, bias: Any) -> None:
    """Raise on masks that count no positions of a sequence in a cache, and on trees that are none."""
    if mask is None:
        return
    if not isinstance(mask, Mask):
        raise ArgumentTypeError(f"mask: got {type(mask).__name__}, need a mask such as causal(), or None")
    for leaf in mask.leaves():
        if isinstance(leaf, Tree):
            _check_tree(leaf.parents, bias)
        if isinstance(leaf, (Documents, Blocks, Selected, Dense)) or (isinstance(leaf, KeyRanges) and leaf.maker != "prefix"):
            raise MaskError(
                f"mask: {leaf} does not go with a cache, whose sequences have lengths of their own; "
                "causal, window, prefix and tree do"
            )


def _check_tree(parents: Any, bias: Any) -> None:
    if isinstance(bias, Alibi):
        raise ArgumentError("bias: alibi counts slots and a tree's positions are depths; pass a bias tensor with a tree")
    if isinstance(parents, Tensor) and readable(parents) and parents.ndim in (1, 2) and parents.numel():
        check_parents(parents.reshape(-1, parents.shape[-1]).numpy())


def sees_ahead(mask: Mask | None) -> bool:
    """May a query see keys after its own, so that one before position 0 would see some?"""
    if mask is None or not mask.static:
        return True
    terms = _terms(mask) if torch.compiler.is_compiling() else _static_terms(mask)
    return not all(any(one.kind.is_bottom_right and one.ints[1] <= 0 for one in term) for term in terms)


def _terms(mask: Mask) -> list[list[Literal]]:
    """The terms of a mask that holds no tensors: its bands and ranges, which no length changes."""
    return list(mask.lower(Binding(MaskShape(1, 1, 1, 1))).terms())


_static_terms = lru_cache(maxsize=64)(_terms)


def sees_all_before(mask: Mask | None) -> bool:
    """Does every query see all keys before the first query of its sequence? (A slot of a tree without a token sees none.)"""
    if isinstance(mask, And):
        return sees_all_before(mask.left) and sees_all_before(mask.right)
    if isinstance(mask, Band):
        return mask.letter == ANCHORS["bottom_right"] and mask.lo <= -UNBOUNDED and mask.hi >= -1
    return mask is None or isinstance(mask, (Full, Tree))


def some_before(pages: Pages, cu: Tensor) -> bool:
    """Has a sequence more queries than tokens? Where that cannot be asked, perhaps."""
    return not readable(pages.lengths) or bool((cu.diff() > pages.seen).any())


def check_packing(cu_q: Tensor, tokens: int) -> None:
    """Raise on queries that are packed otherwise than they are said to be."""
    cu = cu_q.cpu().numpy()
    if cu[0] != 0 or cu[-1] != tokens or (cu[1:] < cu[:-1]).any():
        raise ArgumentError(f"cu_seqlens_q: need 0 to {tokens}, never falling, got {cu[:8].tolist()}")


def check_table(pages: Pages, cu_q: Tensor, mask: Mask | None) -> None:
    """Raise where a query sees what is no page. Numpy: torch takes longer for a few integers."""
    entries = pages.entries.cpu().numpy()
    if entries.size and entries.view(np.uint32).max() < pages.k.shape[0]:
        return  # whatever is seen is there
    lengths, starts, rows = (x.cpu().numpy() for x in (pages.lengths, pages.starts, cu_q.diff()))
    first = np.where(rows > 0, first_seen(mask, lengths, rows), lengths) // pages.page
    past = -(-lengths // pages.page)
    for b in range(len(lengths)):
        own = entries[starts[b] + first[b] : starts[b] + past[b]]
        if len(own) and not 0 <= own.min() <= own.max() < pages.k.shape[0]:
            n = int(np.flatnonzero((own < 0) | (own >= pages.k.shape[0]))[0])
            raise ArgumentError(
                f"table: sequence {b} sees page {first[b] + n} of its table, which is {own[n]}; "
                f"there are {pages.k.shape[0]} pages"
            )


def first_seen(mask: Mask | None, lengths: Any, rows: Any) -> Any:
    """The first key that a query of each sequence may see: pages before it may be gone."""
    if isinstance(mask, Lowered):  # of an operator
        moved = any(kind.is_offset for kind in mask.program.kinds)
        return np.zeros_like(lengths) if moved else first_of(mask.program.terms(), lengths, rows)
    if mask is None or not all(leaf.static or isinstance(leaf, Tree) for leaf in mask.leaves()):
        return np.zeros_like(lengths)
    if mask.static:
        return first_of(_static_terms(mask), lengths, rows)
    return first_of(mask.lower(Binding(MaskShape(len(lengths), 1, 1, 1), varlen=True)).terms(), lengths, rows)


def first_of(terms: Iterable[Iterable[Literal]], lengths: Any, rows: Any) -> Any:
    """The first key that the bands and ranges of a mask's terms let a query of each sequence see."""
    firsts = []
    for term in terms:
        least = np.zeros_like(lengths)
        for literal in term:
            if literal.kind.is_band:
                lo = literal.ints[0] + (lengths - rows if literal.kind.is_bottom_right else 0)
                least = np.maximum(least, lo)
            elif literal.kind.is_range:
                least = np.maximum(least, literal.ints[0])
        firsts.append(least)
    return np.minimum.reduce(firsts).clip(0, lengths)


def token_positions(cu: Tensor, lengths: Tensor, tokens: int, mask: Mask | None) -> Tensor:
    """Where each packed token stands in its sequence, of which they are the last; in a tree that is its depth after the first."""
    sequence, position = positions_of(cu, lengths, tokens)
    for tree in () if mask is None else (leaf for leaf in mask.leaves() if isinstance(leaf, Tree)):
        parents = torch.as_tensor(tree.parents, device=cu.device)
        parents = parents.reshape(-1, parents.shape[-1])
        size = parents.shape[1]
        depth = depths(ancestors(parents, torch.arange(size, device=cu.device))).clamp(min=0).expand(len(lengths), size)
        first = lengths[sequence] - size
        slot = position - first
        position = torch.where(slot >= 0, first + depth[sequence, slot.clamp(0, size - 1)], position)
    return position
