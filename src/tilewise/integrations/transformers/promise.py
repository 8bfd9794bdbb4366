"""A tensor that is promised, not stored: the (B, 1, Sq, Sk) boolean mask models hand from layer to layer.

transformers makes one mask for each forward and passes it through every layer; it asks whether the mask is a tensor of rank 4,
and some models slice, move or negate it. A `PromisedMask` has the shape, dtype and device of that tensor and holds a tilewise
mask instead of its elements. The attention function takes the mask out; every other operation fills the tensor in first, so
whatever a model does to it gives what the dense mask would have given.

Refused is what takes the mask for the float mask of `eager`, 0 where a key is seen: arithmetic, by a layer that computes its
attention itself, and padding or joining it with other tensors, where 0 or False would hide what 0.0 shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import ArgumentError
from tilewise.masks import Binding, Mask, MaskShape, allowed, dense

_aten = torch.ops.aten
_KEEP = {_aten.detach.default, _aten.alias.default, _aten.clone.default}
_AS_FLOATS = {
    getattr(_aten, name + suffix)
    for name in ("add", "sub", "mul", "div", "addcmul", "baddbmm")
    for suffix in ("", "_")
} | {_aten.rsub, _aten.constant_pad_nd}


class PromisedMask(Tensor):
    """Boolean (B, 1 or H, Sq, Sk), True where a query sees a key; `description` is the tilewise mask it stands for."""

    description: Mask

    @staticmethod
    def __new__(cls, description: Mask, shape: Sequence[int], device: torch.device) -> PromisedMask:
        promise: PromisedMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        promise.description = description
        return promise

    def dense(self) -> Tensor:
        """The mask filled in: Sq × Sk elements for each sequence."""
        shape, device = MaskShape(*self.shape), self.device
        program = self.description.lower(Binding(shape, asarray=partial(torch.as_tensor, device=device)))
        rows, keys = (0, shape.seqlen_q), (0, shape.seqlen_k)
        seen = allowed(program, shape, rows, keys, partial(torch.arange, device=device))
        return torch.as_tensor(True if seen is None else seen, device=device).expand(self.shape).contiguous()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PromisedMask({self.description}, shape={tuple(self.shape)}, device={str(self.device)!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args else None
        if isinstance(own, PromisedMask):
            if func in _KEEP or (func is _aten.slice.Tensor and own._whole(*args[1:])):
                return own._on(own.device)
            if func is _aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
                return own._on(kwargs.get("device") or own.device)
        mixes = func is _aten.cat.default and not all(isinstance(x, PromisedMask) for x in args[0])
        if mixes or func.overloadpacket in _AS_FLOATS:
            raise ArgumentError(
                "attention_mask: a layer calculates with the boolean mask of attn_implementation='tilewise' as if it were one of "
                "floats, or computes attention itself, and would see what is masked; use model.set_attn_implementation('eager')"
            )
        args, kwargs = torch.utils._pytree.tree_map_only(PromisedMask, PromisedMask.dense, (args, kwargs))
        made = func(*args, **kwargs)
        if type(made) is Tensor and made.dtype == torch.bool and made.ndim == 4 and not torch.compiler.is_compiling():
            return PromisedMask(dense(made), made.shape, made.device)  # a part or a combination: still a mask
        return made

    def _whole(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> bool:
        """Whether a slice takes everything."""
        return not start and (end is None or end >= self.shape[dim]) and step == 1

    def _on(self, device: torch.device) -> PromisedMask:
        return PromisedMask(self.description.to(device), self.shape, torch.device(device))
