"""What is kept with a mask that holds tensors, for as long as that value lives and its tensors are unchanged.

A memory belongs to the first leaf of a mask that holds tensors, such as `documents(ids)`, by a weak reference: nothing that
lies in it may refer to that leaf. Within it, masks are told apart by their structure and the identities of their leaves.

A memory is emptied when a tensor of the mask has another version, address or shape than before. There is none
- for tensors that count no versions (inference mode, numpy), or whose type or laziness gives their memory another meaning;
- where values are checked in each call (`ops.tensors.checks_values`): on a CPU, and on a GPU with TILEWISE_CHECK=1;
- while a CUDA graph is captured, so that a replay converts and reads what the tensors hold then.
A write through `.data` counts no version, for torch's own checks neither: after one, build the mask anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from tilewise.masks import Mask
from tilewise.masks.algebra import And, Not, Or
from tilewise.ops.tensors import PLAIN, checks_values

MASKS = 16
"""Masks that share their first leaf. When there are more, all are forgotten."""
Memory = dict[Any, Any]
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Kept(NamedTuple):
    state: list[Any]
    leaves: list[Mask]  # but the first, whose memory this is; their identities are part of a key
    memory: Memory


_kept: WeakKeyDictionary[Mask, dict[Any, _Kept]] = WeakKeyDictionary()


def memory_of(mask: Mask, device: torch.device) -> Memory | None:
    """What is kept with a mask that holds tensors, on the current stream of a device; None where nothing may be.

    Raises RuntimeError for tensors of inference mode.
    """
    if checks_values(device):
        return None
    stream = 0
    if device.type == "cuda" and _capturing is not None and _current_stream is not None:
        if _capturing():
            return None
        stream = _current_stream(device.index)
    leaves: list[Mask] = []
    key = (stream, device, _signature(mask, leaves))
    state: list[Any] = []
    for leaf in leaves:
        for x in vars(leaf).values():
            if type(x) in PLAIN:
                state += (x._version, x.data_ptr(), x.shape)
    masks = _kept.get(leaves[0])
    kept = None if masks is None else masks.get(key)
    if kept is None or kept.state != state:
        if not all(map(_counted, leaves)):
            return None
        if masks is None:
            masks = _kept[leaves[0]] = {}
        elif kept is None and len(masks) >= MASKS:
            masks.clear()
        kept = masks[key] = _Kept(state, leaves[1:], {})
    return kept.memory


def _signature(mask: Mask, leaves: list[Mask]) -> Any:
    """A mask's value without references to the leaves that hold tensors, which are added to the list."""
    if mask.static:
        return mask
    kind = type(mask)
    if kind is And or kind is Or:
        return kind, _signature(mask.left, leaves), _signature(mask.right, leaves)  # type: ignore[attr-defined]
    if kind is Not:
        return Not, _signature(mask.part, leaves)  # type: ignore[attr-defined]
    leaves.append(mask)
    return id(mask)


def _counted(leaf: Mask) -> bool:
    """Does every change of what a leaf holds count as a version?"""
    for x in vars(leaf).values():
        if type(x) in PLAIN:
            if x.is_inference() or x.is_neg() or x._is_zerotensor():
                return False
        elif not (x is None or type(x) in (int, str)):
            return False
    return True


def forget() -> None:
    """Empty all memories."""
    _kept.clear()

