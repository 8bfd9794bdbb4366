"""Masks of the fuzz: each expression as a value of the library, and as booleans by rules written down once more.

The rules below are those of the README in the plainest form there is, for one sequence of M queries and N keys. They share
nothing with `tilewise.masks`.

    ("full",)                                  every key
    ("causal", align, offset)                  align "bottom_right" or "top_left"; offset None, an int, or one int a sequence
    ("window", left, right, align, offset)     right None: `left` keys up to the query's own
    ("prefix", n)                              n an int, or one a sequence
    ("padding", lengths, starts)               starts None, or one a sequence
    ("documents", seed, count, form)           "sorted" or "mixed" ids; "+b": for each sequence; "+q": queries have their own
    ("blocks", seed, size_q, size_k, axes)     axes: "", "h" or "bh", which the table has beside blocks of queries and keys
    ("selected", seed, block, per, axes)       axes as of blocks, or "k" or "bk" for one list of each key head
    ("dense", seed, density, axes)             axes among "bhqk" that are not 1
    ("not", x)   ("and", x, y)   ("or", x, y)

What is given for each sequence is a tuple from which sequence b takes entry b mod its length; lengths and starts are cut to the
keys there are. So an expression fits every shape, and a case stays one while it shrinks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import tilewise as tw
from tests.fuzz.case import Case, Expression


def build(case: Case, expression: Expression, device: str = "cpu") -> tw.Mask:
    """The mask as a user writes it."""
    kind, *given = expression
    if kind == "not":
        return ~build(case, given[0], device)
    if kind in ("and", "or"):
        left, right = (build(case, x, device) for x in given)
        return left & right if kind == "and" else left | right
    if kind == "full":
        return tw.full()
    if kind == "causal":
        align, offset = given
        return tw.causal(align, _integers(case, offset, device))
    if kind == "window":
        left, right, align, offset = given
        return tw.window(left, right, align=align, offset=_integers(case, offset, device))
    if kind == "prefix":
        n = given[0]
        return tw.prefix(n if isinstance(n, int) else _tensor(_lengths(case, n), device))
    if kind == "padding":
        starts, ends = _ranges(case, *given)
        lengths = _tensor(ends - starts, device)
        return tw.key_padding(lengths) if given[1] is None else tw.key_padding(lengths, _tensor(starts, device))
    if kind == "documents":
        keys, queries = _ids(case, *given)
        own = queries is not None
        return tw.documents(_tensor(keys, device), q_ids=_tensor(queries, device) if own else None)
    if kind == "blocks":
        return tw.blocks(_tensor(_table(case, *given), device), (given[1], given[2]))
    if kind == "selected":
        return tw.selected(_tensor(_lists(case, *given), device), given[1], given[2])
    assert kind == "dense", kind
    return tw.dense(_tensor(_dense(case, *given), device))


def visible(case: Case, expression: Expression | None, b: int) -> np.ndarray[Any, Any]:
    """Which keys each query of sequence b may see: bool (heads, M, N)."""
    m, n = case.lengths[b]
    shape = (case.heads, m, n)
    if expression is None:
        return np.ones(shape, bool)
    kind, *given = expression
    i, j = np.arange(m)[:, None], np.arange(n)[None, :]
    if kind == "not":
        return ~visible(case, given[0], b)
    if kind == "and":
        return visible(case, given[0], b) & visible(case, given[1], b)
    if kind == "or":
        return visible(case, given[0], b) | visible(case, given[1], b)
    if kind == "full":
        seen = np.ones((m, n), bool)
    elif kind == "causal":
        seen = j <= i + _anchor(case, b, *given)
    elif kind == "window":
        left, right, *place = given
        own = i + _anchor(case, b, *place)
        seen = (own - left < j) & (j <= own) if right is None else (own - left <= j) & (j <= own + right)
    elif kind == "prefix":
        seen = j < (given[0] if isinstance(given[0], int) else _lengths(case, given[0])[b])
    elif kind == "padding":
        starts, ends = _ranges(case, *given)
        seen = (starts[b] <= j) & (j < ends[b])
    elif kind == "documents":
        keys, queries = _ids(case, *given)
        queries = keys if queries is None else queries
        seen = _own(case, queries, b, 0)[:, None] == _own(case, keys, b, 1)[None, :]
    elif kind == "blocks":
        table = _table(case, *given)
        table = table[(None,) * (4 - table.ndim)]
        seen = table[b % table.shape[0]][:, i // given[1], j // given[2]]
    elif kind == "selected":
        lists = _lists(case, *given)
        lists = lists[(None,) * (4 - lists.ndim)]
        own = lists[b % lists.shape[0]].repeat(case.heads // lists.shape[1], axis=0)[:, np.arange(m) // given[2]]
        seen = (own[:, :, None, :] == (j // given[1])[None, :, :, None]).any(-1)
    else:
        dense = _dense(case, *given)
        seen = dense[(None,) * (4 - dense.ndim)][b % dense.shape[0] if dense.ndim == 4 else 0]
    return np.broadcast_to(seen, shape)


def names(expression: Expression | None) -> list[str]:
    """The constructors in an expression."""
    if expression is None:
        return []
    inside = [name for x in expression[1:] if isinstance(x, tuple) and x and isinstance(x[0], str) for name in names(x)]
    return [expression[0], *inside]


def _anchor(case: Case, b: int, align: str, offset: Any) -> int:
    m, n = case.lengths[b]
    if offset is not None:
        return offset if isinstance(offset, int) else offset[b % len(offset)]
    return n - m if align == "bottom_right" else 0


def _integers(case: Case, value: Any, device: str) -> Any:
    if value is None or isinstance(value, int):
        return value
    return torch.tensor([value[b % len(value)] for b in range(case.batch)], dtype=torch.int64).int().to(device)


def _tensor(array: np.ndarray[Any, Any], device: str) -> torch.Tensor:
    """Every third one lies with its axes the other way round."""
    order = "F" if array.size % 3 == 0 else "C"
    return torch.from_numpy(np.array(array, order=order)).to(device)


def _lengths(case: Case, given: tuple[int, ...]) -> np.ndarray[Any, Any]:
    keys = [n for _, n in case.lengths]
    return np.array([min(given[b % len(given)], keys[b]) for b in range(case.batch)], np.int32)


def _ranges(case: Case, lengths: tuple[int, ...], starts: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    keys = np.array([n for _, n in case.lengths], np.int32)
    first = np.zeros(case.batch, np.int32) if starts is None else _lengths(case, starts)
    own = np.array([lengths[b % len(lengths)] for b in range(case.batch)], np.int32)
    return first, np.minimum(first + own, keys)


def _ids(case: Case, seed: int, count: int, form: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Of keys and, if they have their own, of queries: (T,) or (B, S)."""
    r = np.random.RandomState(seed)
    total_q, total_k = case.totals
    each = "+b" in form and not case.packed
    same = all(m == n for m, n in case.lengths)
    shapes = [(case.batch, n) if each else (n,) for n in (total_k, total_q)]
    made = [r.randint(0, count, shape).astype(np.int32) for shape in shapes]
    if "sorted" in form:
        made = [np.sort(x, axis=-1) for x in made]
    return made[0], made[1] if "+q" in form or not same else None


def _own(case: Case, ids: np.ndarray[Any, Any], b: int, side: int) -> np.ndarray[Any, Any]:
    """The ids of sequence b."""
    if case.packed:
        start = case.starts(side)
        return ids[start[b] : start[b + 1]]
    return ids[b] if ids.ndim == 2 else ids


def _table(case: Case, seed: int, size_q: int, size_k: int, axes: str) -> np.ndarray[Any, Any]:
    m, n = case.longest
    front = {"": (), "h": (case.heads,), "bh": (case.batch, case.heads)}[axes]
    return np.random.RandomState(seed).rand(*front, -(-m // size_q), -(-n // size_k)) < 0.5


def _lists(case: Case, seed: int, block: int, per: int, axes: str) -> np.ndarray[Any, Any]:
    """A few blocks each, of those that the shortest sequence has: in a packed batch others would be refused."""
    m, n = case.longest[0], min((n for _, n in case.lengths), default=0)
    front = {"": (), "h": (case.heads,), "k": (case.kv_heads,), "bh": (case.batch, case.heads), "bk": (case.batch, case.kv_heads)}
    r = np.random.RandomState(seed)
    return r.randint(-1, -(-n // block) if n else 0, (*front[axes], -(-m // per), r.randint(0, 6))).astype(np.int32)


def _dense(case: Case, seed: int, density: float, axes: str) -> np.ndarray[Any, Any]:
    full = dict(zip("bhqk", (case.batch, case.heads, *case.longest), strict=True))
    return np.random.RandomState(seed).rand(*(n if axis in axes else 1 for axis, n in full.items())) < density
