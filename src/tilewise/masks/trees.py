"""Trees of draft tokens: who is an ancestor of whom, how deep each token is, and the literals that masks with a tree lower to.

A token's position is that of the tree's first key plus its depth. So in a term with a tree the bands count depths: they become
part of the tree's literal, and what stays of them beside it is a bound that holds for slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.errors import MaskError
from tilewise.masks.arrays import Binding, as_kind, check_integers, fits
from tilewise.masks.program import KINDS, UNBOUNDED, Literal, tree_tile

NO_TOKEN = -2
"""The parent of a slot that holds no token; −1 is that of a root."""


def check_parents(parents: Any) -> None:
    """Raise unless every parent stands before its child. `parents` is a numpy array (B, n)."""
    own = np.arange(parents.shape[1])
    bad = (parents < NO_TOKEN) | (parents >= own)
    orphan = ~bad & (parents >= 0) & (np.take_along_axis(parents, parents.clip(0), axis=1) == NO_TOKEN)
    for wrong, why in ((bad, "need −2 (no token), −1 (a root) or a token before it"), (orphan, "where there is no token")):
        if wrong.any():
            b, i = (int(n) for n in np.argwhere(wrong)[0])
            raise MaskError(f"tree: the parent of token {i} of sequence {b} is {int(parents[b, i])}, {why}")


def ancestors(parents: Any, own: Any) -> Any:
    """Booleans (B, n, n): is token j token i itself or an ancestor of it? `own` is 0, 1, … n − 1. For numpy and torch alike."""
    there = parents != NO_TOKEN
    reach = (parents[:, :, None] == own) | (own[:, None] == own)
    reach = reach & there[:, :, None] & there[:, None, :]
    steps = 1
    while steps < parents.shape[1]:  # paths of twice the length each time
        wide = reach.astype(np.float32) if isinstance(reach, np.ndarray) else reach.float()
        reach, steps = (wide @ wide) > 0, 2 * steps
    return reach


def depths(reach: Any) -> Any:
    """(B, n) ancestors of each token: 0 for a root, −1 for no token."""
    return as_kind(reach.sum(-1) - 1, "int")


def with_trees(terms: list[list[Literal]], binding: Binding) -> list[list[Literal]]:
    """The terms of a mask with a tree in each of them, its literal complete."""
    return [_absorbed(term, binding) for term in terms]


def _absorbed(term: list[Literal], binding: Binding) -> list[Literal]:
    trees = [literal for literal in term if literal.kind.is_tree]
    if len(trees) != 1:
        raise MaskError("tree: a mask has one, joined by &, as in causal() & window(4096) & tree(parents)")
    if any(literal.kind.is_band and not literal.kind.is_bottom_right for literal in term):
        raise MaskError("tree: its tokens are the last ones; masks beside it count from there too, without align or offset")
    parents = trees[0].tensors[0]
    own = binding.asarray(np.arange(parents.shape[1]))
    reach = binding.once(parents, "ancestors", lambda p: ancestors(p, own))
    depth = binding.once(parents, "depths", lambda p: depths(reach))
    lo, hi = next((literal.ints for literal in term if literal.kind.is_band), (-UNBOUNDED, UNBOUNDED))
    literal = _literal(reach, depth, lo, hi)
    rest = [one for one in term if not one.kind.is_tree and not one.kind.is_band]
    if not binding.varlen:
        shape = binding.shape
        q, k = (binding.asarray(np.arange(n)) for n in shape[2:])
        return [*rest, Literal(KINDS["e"], (), (tree_tile(literal, shape, q, k),))]
    slots = (lo - parents.shape[1] if lo > -UNBOUNDED else -UNBOUNDED, hi)  # a slot is at most n beyond its depth
    band = [] if slots == (-UNBOUNDED, UNBOUNDED) else [Literal(KINDS["b"], slots, ())]
    return [*band, *rest, literal]


def _literal(reach: Any, depth: Any, lo: int, hi: int) -> Literal:
    """The ancestors that a band leaves, and from and up to which key before the tree it leaves them, counted from the tree."""
    ahead = depth[:, None, :] - depth[:, :, None]
    there = depth >= 0
    if lo > -UNBOUNDED:
        reach = reach & (ahead >= lo)
    if hi < UNBOUNDED:
        reach = reach & (ahead <= hi)
    first = depth + lo if lo > -UNBOUNDED else depth * 0 - UNBOUNDED
    past = depth + (hi + 1) if hi < UNBOUNDED else depth * 0 + UNBOUNDED
    ends = (as_kind(first, "int"), as_kind(past * there - UNBOUNDED * as_kind(~there, "int"), "int"))
    return Literal(KINDS["a"], (lo, hi, depth.shape[1]), (reach, *ends))


def parent_array(value: Any, binding: Binding, negate: bool) -> Any:
    """parents as (B or 1, n) of the caller's kind."""
    if negate:
        raise MaskError("tree: ~tree(...) is no mask of drafts; join trees with other masks by &")

    def convert(array: Any) -> Any:
        if array.ndim == 1:
            array = array[None]
        if array.ndim != 2 or not array.shape[1] or not fits(array.shape[0], binding.shape.batch):
            raise MaskError(
                f"tree: parents has shape {tuple(array.shape)}, need (tokens,) or ({binding.shape.batch}, tokens), "
                "a row for each sequence"
            )
        check_integers("tree: parents", array)
        return as_kind(array, "int")

    return binding.once(value, "parents", convert)
