"""The constructors users call; they check their arguments and build the values of `algebra`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from tilewise.errors import ArgumentTypeError, MaskError
from tilewise.masks.algebra import (
    Band,
    Blocks,
    Dense,
    Documents,
    Full,
    KeyRange,
    KeyRanges,
    Mask,
    OffsetBand,
    Selected,
    Tree,
)
from tilewise.masks.arrays import check_integer_dtype
from tilewise.masks.program import UNBOUNDED
from tilewise.masks.traced import meet_compiler

Align = Literal["bottom_right", "top_left"]
ANCHORS = {"bottom_right": "b", "top_left": "t"}
LEAST_PER = 16
"""Queries that share a list of `selected`, at least: kernels multiply so many rows at once."""
_EACH = "one integer for each sequence in a list or tensor"
_CAUSAL = Band(-UNBOUNDED, 0, ANCHORS["bottom_right"])  # a value like any other, and the one most calls ask for


def full() -> Mask:
    """Every query sees every key.

    >>> out = tw.attention(q, k, v, mask=tw.full())
    """
    meet_compiler()
    return Full()


def causal(align: Align = "bottom_right", offset: Any = None) -> Mask:
    """A query sees the keys up to its own position.

    align: where queries sit when there are more keys than queries: "bottom_right", the last query at the last key, or
        "top_left", query 0 at key 0.
    offset: puts query 0 at key `offset` instead, as a static cache needs: an int, or a list or tensor (B,) with one integer
        for each sequence.

    `causal()` over 3 queries and 5 keys, and with `align="top_left"`:

        █ █ █ · ·        █ · · · ·
        █ █ █ █ ·        █ █ · · ·
        █ █ █ █ █        █ █ █ · ·

    >>> tw.causal()
    >>> tw.causal(offset=lengths - 1)          # one new query each, over caches filled up to `lengths`
    """
    meet_compiler()
    if offset is None and align == "bottom_right":
        return _CAUSAL
    return _band(-UNBOUNDED, 0, align, offset, "causal")


def window(left: int, right: int | None = None, *, align: Align = "bottom_right", offset: Any = None) -> Mask:
    """`window(n)`: exactly n keys, the last one the query's own. `window(left, right)`: so many before and after it.

    left: how many keys in all, if it stands alone; with `right`, how many before the query's own.
    right: how many keys after the query's own.
    align: where queries sit, as in `causal`.
    offset: puts query 0 at key `offset`, as in `causal`.

    `window(2)` and `window(1, 1)` over 4 queries and keys:

        █ · · ·        █ █ · ·
        █ █ · ·        █ █ █ ·
        · █ █ ·        · █ █ █
        · · █ █        · · █ █

    >>> tw.causal() & tw.window(4096)
    >>> tw.window(256, 256)                    # 513 keys around each query
    """
    meet_compiler()
    if right is None:
        keys = integer("window: n", left, 1)
        return _band(1 - keys, 0, align, offset, "window")
    return _band(-integer("window: left", left, 0), integer("window: right", right, 0), align, offset, "window")


def prefix(n: Any) -> Mask:
    """Every query sees the first n keys.

    n: an int, or a list or tensor (B,) with one integer for each sequence; more than there are keys is all of them.

    `causal() | prefix(2)` over 4 queries and keys:

        █ █ · ·
        █ █ · ·
        █ █ █ ·
        █ █ █ █

    >>> tw.causal() | tw.prefix(128)           # prefix-LM
    """
    meet_compiler()
    if is_integer(plain(n)):
        return KeyRange(0, integer("prefix: n", n, 0))
    return KeyRanges(_integers("prefix: n", n), maker="prefix")


def key_padding(lengths: Any, start: Any = None) -> Mask:
    """Keys that are there: sequence b holds `lengths[b]` of them, from `start[b]` on.

    lengths: a list or tensor (B,) of integers from 0 to the number of keys.
    start: the first key of each sequence, likewise (B,), for batches padded on the left; 0 if None.

    A boolean padding mask (B, Sk) needs no `key_padding`: `mask=m[:, None, None, :]`, True = attend.

    >>> tw.causal() & tw.key_padding(lengths)
    >>> tw.key_padding(lengths, start=keys - lengths)          # padded on the left
    """
    meet_compiler()
    if "bool" in str(getattr(lengths, "dtype", None)):
        raise ArgumentTypeError(
            f"key_padding: lengths is a {lengths.dtype} of shape {tuple(lengths.shape)}, need integers; a padding mask (batch, "
            "keys) is passed as it is, mask=mask[:, None, None, :], where True = attend (negate one in which True is padding)"
        )
    if start is not None:
        start = _integers("key_padding: start", start, _EACH)
    same = f"; for all sequences alike: prefix({lengths})" if is_integer(lengths) else ""
    return KeyRanges(_integers("key_padding: lengths", lengths, _EACH + same), start)


def documents(ids: Any, q_ids: Any = None) -> Mask:
    """A query sees the keys with its own document id.

    ids: integers (Sk,) or (B, Sk), one for each key; in a packed batch one for each token, (Tk,).
    q_ids: the same for the queries, where these are not the keys' own tokens.

    `documents([0, 0, 1, 1])`, alone and with `causal()`:

        █ █ · ·        █ · · ·
        █ █ · ·        █ █ · ·
        · · █ █        · · █ ·
        · · █ █        · · █ █

    >>> tw.causal() & tw.documents(torch.tensor([0, 0, 0, 1, 1]))
    """
    meet_compiler()
    need = "one integer for each position in a list or tensor, (S,) or (B, S)"
    of_queries = None if q_ids is None else _integers("documents: q_ids", q_ids, need)
    return Documents(_integers("documents: ids", ids, need), of_queries)


def blocks(table: Any, size: int | tuple[int, int]) -> Mask:
    """Block-sparse: query q sees key k where the table is true for their blocks.

    table: booleans (query blocks, key blocks), also with heads, or batch and heads, before them; these may be 1.
    size: positions of a block: an int, or a pair (queries, keys).

    The table [[1, 0, 0], [1, 1, 0], [0, 1, 1]] in blocks of 2:

        █ █ · · · ·
        █ █ · · · ·
        █ █ █ █ · ·
        █ █ █ █ · ·
        · · █ █ █ █
        · · █ █ █ █

    >>> tw.blocks(torch.eye(32, dtype=torch.bool), 128)         # 4096 positions, each block sees itself
    """
    meet_compiler()
    if not hasattr(table, "shape"):
        raise ArgumentTypeError(f"blocks: table is a {type(table).__name__}, need a boolean tensor or array")
    sizes = size if isinstance(size, tuple) else (size, size)
    if len(sizes) != 2:
        raise MaskError(f"blocks: size is {size!r}, need an int or a pair (queries, keys)")
    return Blocks(table, integer("blocks: size", sizes[0], 1), integer("blocks: size", sizes[1], 1))


def selected(indices: Any, block: int = 128, per: int = 128) -> Mask:
    """Lists of key blocks: each block of `per` queries sees the blocks of `block` keys that its list names.

    indices: integers (⌈Sq / per⌉, k), also with heads, or batch and heads, before them: of heads 1, Hq, or Hk, where the query
        heads of a key head share a list; of the batch 1 or B. −1 names none, and a block named twice counts once.
    block: keys of a block; block 0 begins at key 0.
    per: queries that share a list, at least 16; they count from query 0, whatever Sk − Sq is.

    In a packed batch queries and keys count within their sequence, B is the number of sequences, and there are lists enough for
    the longest. Memory is that of `indices`, O(N · k).

    `selected([[0, -1], [0, 1], [2, 1]])` in blocks of 2 (a list of lists stands for a tensor here, and `per` would be 16):

        █ █ · · · ·
        █ █ · · · ·
        █ █ █ █ · ·
        █ █ █ █ · ·
        · · █ █ █ █
        · · █ █ █ █

    >>> tw.causal() & (tw.selected(top, block=64) | tw.window(512))      # top (B, Hk, ⌈Sq / 128⌉, 16)
    """
    meet_compiler()
    if not hasattr(indices, "shape"):
        raise ArgumentTypeError(f"selected: indices is a {type(indices).__name__}, need an integer tensor or array")
    check_integer_dtype("selected: indices", indices)
    return Selected(indices, integer("selected: block", block, 1), integer("selected: per", per, LEAST_PER))


def tree(parents: Any) -> Mask:
    """Draft tokens that form a tree: each sees itself, its ancestors and every key before the tree.

    parents: integers (n,) or (B, n) for the last n tokens of each sequence: the index of each token's parent among them, which
        stands before it; −1 for a root, −2 where there is no token.

    A token's position is that of the tree's first plus its depth: that is what `window` beside it and a rotary embedding count.
    Queries before the tree see no token of it. Join it with other masks by &.

    `causal() & tree([-1, 0, 0, 1])` over 4 queries and 6 keys, and with `window(3)`:

        █ █ █ · · ·        █ █ █ · · ·
        █ █ █ █ · ·        · █ █ █ · ·
        █ █ █ · █ ·        · █ █ · █ ·
        █ █ █ █ · █        · · █ █ · █

    >>> mask = tw.causal() & tw.tree(parents)                   # parents (B, n): two drafts share their first token
    >>> out = tw.attention_cached(q, cache, new=(k, v), mask=mask)
    """
    meet_compiler()
    if isinstance(parents, (list, np.ndarray)):
        values = np.asarray(parents)
        if values.ndim not in (1, 2) or values.dtype.kind not in "iu" or not values.shape[-1]:
            raise ArgumentTypeError(f"tree: parents is {parents!r}, need integers (n,) or (B, n)")
        from tilewise.masks.trees import check_parents

        check_parents(values if values.ndim == 2 else values[None])
        return Tree(values)
    if not hasattr(parents, "dtype"):
        raise ArgumentTypeError(f"tree: parents is a {type(parents).__name__}, need an integer tensor (n,) or (B, n)")
    check_integer_dtype("tree: parents", parents)
    return Tree(parents)


def dense(mask: Any) -> Mask:
    """A mask given element by element; a bare boolean tensor as `mask=` means the same.

    mask: booleans that broadcast to (B, H, Sq, Sk), True = attend.

    >>> tw.causal() & tw.dense(padding[:, None, None, :])       # padding (B, Sk)
    """
    meet_compiler()
    if "bool" not in str(getattr(mask, "dtype", None)):
        got = getattr(mask, "dtype", type(mask).__name__)
        raise ArgumentTypeError(
            f"dense: got {got}, need a boolean tensor (True = attend); additive masks are passed as bias="
        )
    return Dense(mask)


def _band(lo: int, hi: int, align: Align, offset: Any, name: str) -> Mask:
    if not isinstance(align, str) or align not in ANCHORS:
        raise MaskError(f"{name}: align is {align!r}, need 'bottom_right' or 'top_left'")
    if offset is None:
        return Band(max(lo, -UNBOUNDED), min(hi, UNBOUNDED), ANCHORS[align])
    if not is_integer(plain(offset)):
        return OffsetBand(lo, hi, _integers(f"{name}: offset", offset))
    offset = integer(f"{name}: offset", offset, -UNBOUNDED + 1)
    return Band(lo if lo <= -UNBOUNDED else lo + offset, hi if hi >= UNBOUNDED else hi + offset, "t")


def is_integer(value: Any) -> bool:
    """A Python integer, or torch's symbolic one (which must not be forced to a value)."""
    return (isinstance(value, int) and not isinstance(value, bool)) or type(value).__name__ == "SymInt"


def plain(value: Any) -> Any:
    """An integer of numpy's as Python's own, anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def integer(name: str, value: Any, least: int) -> int:
    """An integer argument as an int (or torch's symbolic one); raises for what is none, or out of range."""
    value = plain(value)
    if not is_integer(value):
        raise ArgumentTypeError(f"{name} is {value!r} ({type(value).__name__}), need an integer")
    if isinstance(value, int):
        if value < least:
            raise MaskError(f"{name} is {value}, need at least {least}")
        if value > UNBOUNDED:
            raise MaskError(f"{name} is {value}, need at most {UNBOUNDED} (which means: no limit)")
    return value  # type: ignore[no-any-return]  # an int, or as good as one


def _integers(name: str, value: Any, need: str = "an integer, or one integer for each sequence in a list or tensor") -> Any:
    """A tensor, array or list of integers; dtype and shape are checked when the lengths are known."""
    if isinstance(value, (list, tuple)):
        value = [plain(x) for x in value]
        if not all(is_integer(x) for x in value):
            raise ArgumentTypeError(f"{name} is {value!r}, need integers")
        if not all(-(2**31) <= x < 2**31 for x in value):
            raise MaskError(f"{name} is {value!r}, need integers of 32 bits")
        return value
    if not hasattr(value, "dtype"):
        raise ArgumentTypeError(f"{name} is {value!r} ({type(value).__name__}), need {need}")
    check_integer_dtype(name, value)
    return value
