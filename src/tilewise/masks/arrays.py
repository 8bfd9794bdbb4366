"""Boolean arrays of masks: their leading sides, and what to write for one that has the wrong ones."""

from __future__ import annotations

from typing import Any

from tilewise.errors import MaskError
from tilewise.masks.program import MaskShape


def fits(size: int, want: int) -> bool:
    """Whether a size broadcasts.

    Not `size in (1, want)`: torch's compiler does not see symbolic sizes in a tuple, and of a size that data decide, `want`
    itself is the one thing it can be compared with.
    """
    return size == want or size == 1


def rank4(mask: str, name: str, array: Any, shape: MaskShape) -> Any:
    """The array as (batch, heads, …), each of these 1 or what the problem has."""
    if not 2 <= array.ndim <= 4:
        raise MaskError(
            f"{mask}: {name} has rank {array.ndim}, need 2 (queries, keys), 3 (heads first) or 4 (batch, heads first)"
        )
    added = 4 - array.ndim
    array = array[(None,) * added]
    for size, want, axis in list(zip(array.shape[:2], shape[:2], ("batch", "heads"), strict=True))[added:]:
        if not fits(size, want):
            hint = padding_hint(array.shape[1:], shape) if mask == "dense" else ""
            raise MaskError(
                f"{mask}: {name} has {size} along {axis}, the problem has {want} (query heads count); use 1 or {want}{hint}"
            )
    return array


def padding_hint(sides: Any, shape: MaskShape) -> str:
    """What to write for a mask that has a batch and no heads."""
    batch, _, queries, keys = shape
    if tuple(sides) == (batch, keys):
        return "; a padding mask (batch, keys) is passed as mask[:, None, None, :]"
    return "; a mask (batch, queries, keys) is passed as mask[:, None]" if tuple(sides) == (batch, queries, keys) else ""
