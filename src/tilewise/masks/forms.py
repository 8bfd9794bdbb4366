"""A mask in other forms: as the text a person would write, and as the boolean array it stands for.

torch is not imported: it is there where a mask holds its tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tilewise.errors import DeviceError
from tilewise.masks.algebra import (
    And,
    Band,
    Blocks,
    Dense,
    Documents,
    KeyRange,
    KeyRanges,
    Lowered,
    Mask,
    Not,
    OffsetBand,
    Or,
    Selected,
    Tree,
)
from tilewise.masks.arrays import Binding
from tilewise.masks.program import UNBOUNDED, Literal, MaskProgram, MaskShape, allowed

FEW = 8
"""Integers of a tensor that are written out."""


def text(mask: Mask) -> str:
    """The expression that builds the mask: `causal() & window(512) | prefix(16)`."""
    match mask:
        case Or(left=left, right=right):
            return f"{text(left)} | {_within(right, Or)}"
        case And(left=left, right=right):
            return f"{_within(left, Or)} & {_within(right, Or, And)}"
        case Not(part=part):
            return f"~{_within(part, Or, And)}"
        case Band(lo=lo, hi=hi, letter=letter):
            return _band(lo, hi, letter)
        case OffsetBand(lo=lo, hi=hi, offset=offset):
            return _call(*_width(lo, hi), f"offset={_values(offset)}")
        case KeyRange(start=0, end=end):
            return f"prefix({_number(end)})"
        case KeyRanges(lengths=lengths, start=start, maker=maker):
            return _call(maker, _values(lengths), *([] if start is None else [f"start={_values(start)}"]))
        case Documents(ids=ids, q_ids=q_ids):
            return _call("documents", _values(ids), *([] if q_ids is None else [f"q_ids={_values(q_ids)}"]))
        case Blocks(table=table, size_q=size_q, size_k=size_k):
            return f"blocks({_values(table)}, {size_q if size_q == size_k else (size_q, size_k)})"
        case Selected(indices=indices, size_k=block, size_q=per):
            return f"selected({_values(indices)}, block={block}, per={per})"
        case Tree(parents=parents):
            return f"tree({_values(parents)})"
        case Dense(tensor=tensor):
            return f"dense({_values(tensor)})"
        case Lowered(program=program):
            return f"<lowered mask {program.structure!r}>"
    return f"{type(mask).__name__.lower()}()"


def describe_mask(program: MaskProgram) -> str:
    """The mask as it was built, term by term."""
    if not program.structure:
        return "no mask"
    return " | ".join(" & ".join(_describe_literal(literal) for literal in term) for term in program.terms())


def _describe_literal(literal: Literal) -> str:
    kind, ints, _ = literal
    if kind.is_band:
        lo, hi = ints
        where = " at an offset" if kind.is_offset else "" if kind.is_bottom_right else " from the top left"
        if lo <= -UNBOUNDED:
            return ("causal" if hi == 0 else f"up to {hi:+d}") + where
        if hi >= UNBOUNDED:
            return f"from {lo:+d} on" + where
        return (f"window({1 - lo})" if hi == 0 else f"window({-lo}, {hi})") + where
    if kind.is_range:
        return f"prefix({ints[1]})" if ints[0] <= 0 else f"keys {ints[0]}…{ints[1] - 1}"
    if kind.is_padding:
        return "key padding"
    if not kind.reads_data:
        return "nothing"
    names = {"documents": kind.is_documents, "blocks": kind.is_blocks, "selected": kind.is_selected}
    names |= {"dense": kind.is_dense, "tree": kind.is_tree}
    return "~" * kind.negated + next(name for name, given in names.items() if given)


def _within(mask: Mask, *looser: type[Mask]) -> str:
    return f"({text(mask)})" if isinstance(mask, looser) else text(mask)


def _call(name: str, *arguments: str) -> str:
    return f"{name}({', '.join(arguments)})"


def _band(lo: int, hi: int, letter: str) -> str:
    if not (isinstance(lo, int) and isinstance(hi, int)):  # symbolic: asking which they are would fix them
        return f"<band {letter!r} from {lo} to {hi}>"
    if letter == "b":
        return _call(*_width(lo, hi))
    if hi == 0 or (-UNBOUNDED < lo <= 0 <= hi):
        return _call(*_width(lo, hi), "align='top_left'")
    if lo <= -UNBOUNDED:
        return f"causal(offset={hi})"
    if hi >= UNBOUNDED:
        return f"window(0, {_number(hi)}, offset={lo})"
    return f"window({_number(hi - lo + 1)}, offset={hi})"


def _width(lo: int, hi: int) -> list[str]:
    """The name and widths of a band around its diagonal."""
    if hi == 0:
        return ["causal"] if lo <= -UNBOUNDED else ["window", _number(1 - lo)]
    return ["window", _number(-lo), _number(hi)]


def _number(n: int) -> str:
    return "2**30" if n == UNBOUNDED else f"{n}"


def _values(x: Any) -> str:
    """A list as it is, a few integers written out, any other tensor by its form; nothing on another device is read."""
    if isinstance(x, list):
        return f"{x}"
    kind, device = ("array", "") if isinstance(x, np.ndarray) else ("tensor", str(x.device))
    dtype = str(x.dtype).removeprefix("torch.")
    if x.ndim <= 1 and x.shape[:1] <= (FEW,) and dtype != "bool" and device in ("", "cpu"):
        try:
            return f"{kind}({x.tolist()})"
        except RuntimeError:  # traced or batched by torch.func: it has no values
            pass
    return f"<{dtype} {kind} {tuple(x.shape)}{f' on {device}' if device not in ('', 'cpu') else ''}>"


def to_array(mask: Mask, queries: int, keys: int) -> Any:
    """The booleans (B or 1, H or 1, queries, keys): a tensor where the mask holds tensors, a numpy array otherwise."""
    shape = mask_sides(mask, queries, keys)
    tensors = [array for leaf in mask.leaves() for array, _ in _arrays(leaf)]
    asarray, arange = _kind([x for x in tensors if hasattr(x, "is_cuda")])
    program = mask.lower(Binding(shape, asarray=asarray))
    tile = allowed(program, shape, (0, queries), (0, keys), arange)
    if tile is None:
        tile = arange(0, 1)[None, None, None] == 0
    whole = (tile.shape[0], tile.shape[1], queries, keys)
    if isinstance(tile, np.ndarray):
        return np.broadcast_to(tile, whole).copy()
    return tile.new_empty(whole).copy_(tile)


def mask_sides(mask: Mask, queries: int, keys: int) -> MaskShape:
    """The shape of a mask over so many queries and keys: its batch and heads are those of its tensors."""
    tensors = [array for leaf in mask.leaves() for array in _arrays(leaf)]
    sides = [(1,) * (rank - x.ndim) + tuple(x.shape) for x, rank in tensors]
    heads = max((side[1] for side in sides if len(side) == 4), default=1)  # only arrays of rank 4 have heads
    return MaskShape(max((side[0] for side in sides), default=1), heads, queries, keys)


def _arrays(leaf: Mask) -> list[tuple[Any, int]]:
    """The arrays a mask holds, each with the rank it has when no leading side is left out."""
    match leaf:
        case OffsetBand(offset=offset):
            arrays: list[tuple[Any, int]] = [(offset, 1)]
        case KeyRanges(lengths=lengths, start=start):
            arrays = [(lengths, 1), (start, 1)]
        case Tree(parents=parents):
            arrays = [(parents, 2)]
        case Documents(ids=ids, q_ids=q_ids):
            arrays = [(ids, 2), (q_ids, 2)]
        case Blocks(table=tensor) | Selected(indices=tensor) | Dense(tensor=tensor):
            arrays = [(tensor, 4)]
        case _:
            arrays = []
    return [(np.asarray(x) if isinstance(x, list) else x, rank) for x, rank in arrays if x is not None]


def _kind(tensors: list[Any]) -> tuple[Callable[[Any], Any], Callable[[int, int], Any]]:
    """How arrays are taken and made: by torch on the device of the tensors, by numpy if there are none."""
    if not tensors:
        return np.asarray, np.arange
    torch = sys.modules["torch"]
    devices = sorted({str(x.device) for x in tensors})
    if len(devices) > 1:
        raise DeviceError(f"mask: holds tensors on {' and '.join(devices)}; move them with mask.to(device)")
    device = tensors[0].device
    return partial(torch.as_tensor, device=device), partial(torch.arange, device=device)
