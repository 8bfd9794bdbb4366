"""A tensor that is promised, not stored: the (B, 1, Sq, Sk) boolean mask models hand from layer to layer.

transformers makes one mask for each forward and passes it through every layer; it asks whether the mask is a tensor of rank 4,
and some models slice, move or negate it. A `PromisedMask` has the shape, dtype and device of that tensor and holds a tilewise
mask instead of its elements. The attention function takes the mask out; every other operation fills the tensor in first, so
whatever a model does to it gives what the dense mask would have given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.masks import Binding, Mask, MaskShape, allowed

_KEEP = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default}


class PromisedMask(Tensor):
    """Boolean (B, 1, Sq, Sk), True where a query sees a key; `description` is the tilewise mask it stands for."""

    description: Mask

    @staticmethod
    def __new__(cls, description: Mask, shape: tuple[int, int, int], device: torch.device) -> PromisedMask:
        batch, queries, keys = shape
        promise: PromisedMask = torch.Tensor._make_wrapper_subclass(
            cls, (batch, 1, queries, keys), dtype=torch.bool, device=device
        )
        promise.description = description
        return promise

    def dense(self) -> Tensor:
        """The mask filled in: Sq × Sk elements for each sequence."""
        batch, heads, queries, keys = self.shape
        shape = MaskShape(batch, heads, queries, keys)

        def asarray(x: Any) -> Tensor:
            return torch.as_tensor(x, device=self.device)

        def arange(lo: int, hi: int) -> Tensor:
            return torch.arange(lo, hi, device=self.device)

        program = self.description.lower(Binding(shape, asarray=asarray))
        tile = allowed(program, shape, (0, queries), (0, keys), arange)
        if tile is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        return torch.as_tensor(tile).expand(self.shape).contiguous()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PromisedMask({self.description}, shape={tuple(self.shape)}, device={str(self.device)!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args else None
        if isinstance(own, PromisedMask):
            if func in _KEEP:
                return own._on(own.device)
            if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
                return own._on(kwargs.get("device") or own.device)
        args, kwargs = torch.utils._pytree.tree_map_only(PromisedMask, PromisedMask.dense, (args, kwargs))
        return func(*args, **kwargs)

    def _on(self, device: torch.device) -> PromisedMask:
        batch, _, queries, keys = self.shape
        return PromisedMask(self.description.to(device), (batch, queries, keys), torch.device(device))
