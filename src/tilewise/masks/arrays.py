"""Arrays of masks: of the caller's kind, of the right sides and dtype; and what to write for one that has the wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewise.errors import ArgumentTypeError, MaskError
from tilewise.masks.program import UNBOUNDED, MaskShape

INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
LIMIT = UNBOUNDED - 1
"""Lengths and offsets are cut to ± this, beyond every position: sums and differences of two stay within 32 bits."""


@dataclass(frozen=True)
class Binding:
    """What a mask is lowered for. `asarray` brings the mask's tensors to the caller's kind and device."""

    shape: MaskShape
    varlen: bool = False
    asarray: Callable[[Any], Any] = np.asarray
    kv_heads: int | None = None
    """None where nobody knows; then any divisor of the query heads may be it."""
    converted: list[tuple[Any, str, Any]] = field(default_factory=list, compare=False)
    """Arrays that were converted: one that stands in several terms is converted once, and stays the same there."""

    def once(self, value: Any, what: str, convert: Callable[[Any], Any]) -> Any:
        """`convert(array)` of a value, the same object for the same value."""
        for known, kind, result in self.converted:
            if known is value and kind == what:
                return result
        result = convert(self.asarray(value))
        self.converted.append((value, what, result))
        return result


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


def as_kind(array: Any, kind: str) -> Any:
    """`array` as int32 or bool, for numpy and torch alike."""
    if isinstance(array, np.ndarray):
        return array.astype(np.int32 if kind == "int" else np.bool_)
    return array.int() if kind == "int" else array.bool()


def per_sequence(name: str, value: Any, binding: Binding) -> Any:
    array = binding.asarray(value)
    if array.ndim == 0:
        array = array[None]
    elif array.ndim != 1 or not fits(array.shape[0], binding.shape.batch):
        raise MaskError(
            f"mask: {name} has shape {tuple(array.shape)}, need one integer for each of the {binding.shape.batch} sequences"
        )
    check_integers(f"mask: {name}", array)
    wide = array if array.dtype.itemsize == 8 else as_kind(array, "int")
    return as_kind(wide.clip(-LIMIT, LIMIT), "int")


def document_ids(name: str, value: Any, length: int, binding: Binding) -> Any:
    return binding.once(value, name, lambda ids: _document_ids(name, ids, length, binding))


def _document_ids(name: str, ids: Any, length: int, binding: Binding) -> Any:
    batch = 1 if binding.varlen or ids.ndim == 1 else binding.shape.batch
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or not fits(ids.shape[0], batch) or ids.shape[1] != length:
        want = f"({length},)" if binding.varlen else f"({length},) or ({binding.shape.batch}, {length})"
        raise MaskError(f"documents: {name} has shape {tuple(ids.shape)}, need {want}")
    check_integers(f"documents: {name}", ids)
    return as_kind(ids, "int")


def check_integer_dtype(name: str, array: Any) -> None:
    if str(array.dtype).removeprefix("torch.") not in INTEGERS:
        raise ArgumentTypeError(f"{name}: dtype {array.dtype}, need integers of at most 64 bits; convert with .int()")


def check_integers(name: str, array: Any) -> None:
    check_integer_dtype(name, array)
    if isinstance(array, np.ndarray) and array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise MaskError(f"{name}: integers from {array.min()} to {array.max()}, need integers of 32 bits")


def block_lists(lists: Any) -> Any:
    """The numbers of blocks as 32-bit integers."""
    check_integers("selected: indices", lists)
    return as_kind(lists if lists.dtype.itemsize < 8 else lists.clip(-1, LIMIT), "int")
