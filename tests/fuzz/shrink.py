"""A failing case made smaller, greedily: the first simpler case that still fails is the next one to simplify."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.fuzz.case import Case, Expression

SIZES = ("head_dim", "head_dim_v", "kv_heads", "group")
KEPT = ("seed", "lengths", "mask", "packed", "wanted", "strides", "sizes", "lse", *SIZES)
"""Fields that have their own ways to become simpler; the others go back to their defaults."""


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 30.0) -> Case:
    """The smallest case found in that time."""
    end = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for simpler in candidates(case):
            if time.monotonic() > end:
                return case
            if fails(simpler):
                case, found = simpler, True
                break
    return case


def candidates(case: Case) -> Iterator[Case]:
    """Simpler cases, the boldest first."""
    for field in fields(case):
        if field.name not in KEPT and getattr(case, field.name) != field.default:
            yield replace(case, **{field.name: field.default})
    if case.mask is not None:
        for smaller in (None, *_smaller_masks(case.mask)):
            yield replace(case, mask=smaller)
    if len(case.lengths) > 1:
        for b in range(len(case.lengths)):
            yield replace(case, lengths=case.lengths[:b] + case.lengths[b + 1 :])
    if case.packed and len(set(case.lengths)) == 1:
        yield replace(case, packed=False)
    yield from _shorter(case)
    for name in SIZES:
        size = getattr(case, name)
        for smaller in sorted({1, size // 2, size - 1} - {0, size}):
            yield replace(case, **{name: smaller})
    if case.lse == "grad":
        yield replace(case, lse="yes")
    if len(case.wanted) > 1:
        for letter in case.wanted:
            yield replace(case, wanted=letter)
    for i in range(len(case.strides)):
        yield replace(case, strides=case.strides[:i] + case.strides[i + 1 :])
    for i, size in enumerate(case.sizes):
        if size != 1.0:
            yield replace(case, sizes=(*case.sizes[:i], 1.0, *case.sizes[i + 1 :]))


def _shorter(case: Case) -> Iterator[Case]:
    """Fewer queries or keys: of one sequence if they are packed, of all if they are alike."""
    for b in range(len(case.lengths)) if case.packed else (0,):
        if not case.lengths:
            return
        m, n = case.lengths[b]
        pairs = [(m // 2, n // 2), (m // 2, n), (m, n // 2), (m - 1, n - 1), (m - 1, n), (m, n - 1)]
        for pair in pairs:
            if min(pair) >= 0 and pair != (m, n):
                whole = (*case.lengths[:b], pair, *case.lengths[b + 1 :])
                yield replace(case, lengths=whole if case.packed else (pair,) * len(case.lengths))


def _smaller_masks(mask: Expression) -> Iterator[Expression]:
    """Parts of a mask, and the mask with smaller parts."""
    kind, *given = mask
    if kind not in ("and", "or", "not"):
        return
    yield from given
    for i, part in enumerate(given):
        for smaller in _smaller_masks(part):
            yield (kind, *given[:i], smaller, *given[i + 1 :])
