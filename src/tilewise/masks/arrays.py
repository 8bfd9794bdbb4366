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


def grouped(mask: str, name: str, array: Any, shape: MaskShape, kv_heads: int | None) -> tuple[Any, int]:
    """The array as (batch, lists, rows, entries), and how many query heads share one of its lists."""
    if not 2 <= array.ndim <= 4:
        raise MaskError(
            f"{mask}: {name} has rank {array.ndim}, shape {tuple(array.shape)}; need 2 (query blocks, k), 3 (heads first) or 4 "
            "(batch, heads first)"
        )
    added, heads = 4 - array.ndim, shape.heads
    array = array[(None,) * added]
    if not added and not fits(array.shape[0], shape.batch):
        raise MaskError(
            f"{mask}: {name} has {array.shape[0]} along batch, the problem has {shape.batch}; use 1 or {shape.batch}"
        )
    sides = array.shape[1]
    if sides == 1:
        return array, max(1, heads)
    if sides == heads:
        return array, 1
    if sides and heads % sides == 0 and sides == (kv_heads or sides):
        return array, heads // sides
    there = f"{heads} query heads" + (f" and {kv_heads} key heads" if kv_heads else "")
    use = sorted({1, kv_heads or 1, heads})
    raise MaskError(
        f"{mask}: {name} has {sides} along heads, the problem has {there}; use {' or '.join(map(str, use))}"
    )


def padding_hint(sides: Any, shape: MaskShape) -> str:
    """What to write for a mask that has a batch and no heads."""
    batch, _, queries, keys = shape
    if tuple(sides) == (batch, keys):
        return "; a padding mask (batch, keys) is passed as mask[:, None, None, :]"
    return "; a mask (batch, queries, keys) is passed as mask[:, None]" if tuple(sides) == (batch, queries, keys) else ""
