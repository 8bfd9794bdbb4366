"""Gluon's values as torch's: tensors, pointers, shared memory, products in flight. See `gluon_threads`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class Type:
    """What `x.type` tells: a shape, and a layout for the asking."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = list(shape)
        self.layout = None


def raw(x: Any) -> Any:
    return x.value if isinstance(x, Value) else x


class Value:
    """A tensor, or a number as one without sides."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @property
    def type(self) -> Type:
        return Type(tuple(self.value.shape))

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        if bitcast and dtype == torch.int16:  # numbers stay what they are
            return self
        if bitcast and self.value.dtype == torch.int16:  # halves of words
            return Value(self.value.view(dtype))
        if dtype == "uint32":
            return Value(self.value.to(torch.int64) & 0xFFFFFFFF)
        return Value(self.value.to(dtype))

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.value.reshape(shape))

    def __getitem__(self, at: Any) -> Value:
        return Value(self.value[at])

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def abs(self) -> Value:
        return Value(self.value.abs())

    def __neg__(self) -> Value:
        return Value(-self.value)

    def __hash__(self) -> int:
        return id(self)


class Product(Value):
    """A product in flight: computed when it is waited for, from what its operands hold then."""

    def __init__(self, a: Any, b: Shared, acc: Value | None) -> None:
        self.operands, self.result = (a, b, acc), None

    @property
    def value(self) -> Any:  # type: ignore[override]
        assert self.result is not None, "a product is read before it is waited for"
        return self.result

    def finish(self) -> None:
        a, b, acc = self.operands
        result = a.value.float() @ b.value.float()
        self.result = result if acc is None else result + acc.value


def _binary(name: str, function: Callable[[Any, Any], Any]) -> None:
    def forward(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return other + self
        return Value(function(self.value, raw(other)))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", lambda self, other: Value(function(torch.as_tensor(raw(other)), self.value)))


for _name in ("add", "sub", "mul", "truediv", "and_", "or_", "xor", "lshift", "rshift", "mod"):
    _binary(_name.rstrip("_"), getattr(operator, _name))
_binary("floordiv", lambda x, y: torch.div(torch.as_tensor(x), torch.as_tensor(y), rounding_mode="trunc"))  # as in C
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _binary(_name, getattr(operator, _name))


class Pointer:
    """Into the memory of a tensor; elements, not bytes."""

    def __init__(self, memory: torch.Tensor, at: torch.Tensor) -> None:
        self.memory, self.at = memory, at

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + torch.as_tensor(raw(other)).to(torch.int64))

    __radd__ = __add__

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def to(self, dtype: Any) -> Pointer:
        return self


def pointer(x: torch.Tensor) -> Pointer:
    """To the first element of the memory that x views, whose strides then count from there."""
    flat = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return Pointer(flat, torch.tensor(x.storage_offset()))


class Shared:
    """Shared memory; barriers as a list."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def type(self) -> Type:
        return Type((len(self.value), 1) if isinstance(self.value, list) else tuple(self.value.shape))

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    def index(self, i: Any) -> Any:
        return self.value[int(i)] if isinstance(self.value, list) else Shared(self.value[int(i)])

    def slice(self, start: int, size: int, dim: int = 0) -> Shared:
        return Shared(self.value.narrow(dim, int(start), size))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.value.permute(order))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.value.view(shape))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Boxes:
        """Tiles [stages, 1, 1, N, width] as boxes of 64 columns and half of the rows, as they lie in swizzled memory."""
        stages, _, _, rows, width = self.value.shape
        boxes = self.value.view(stages, 2, rows // 2, width // 64, 64).permute(0, 3, 1, 2, 4).unflatten(3, (rows // 4, 2))
        assert shape == [stages * width // 32, 1, 1, rows // 4, 2, 64]
        return Boxes(boxes)

    def load(self, layout: Any = None) -> Value:
        return Value(self.value.clone())

    def store(self, x: Value) -> None:
        assert x.value.shape == self.value.shape and x.value.dtype == self.value.dtype
        self.value.copy_(x.value)


class Boxes:
    """Parts [stages, columns / 64, 2, N / 4, 2, 64] of tiles in shared memory."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def index(self, i: Any) -> Shared:
        stage, rest = divmod(int(i), 2 * self.value.shape[1])
        return Shared(self.value[stage, rest // 2, rest % 2][None, None])


def arange(start: int, end: int, layout: Any = None) -> Value:
    return Value(torch.arange(start, end))


def tensor_of(x: Any) -> torch.Tensor:
    found = raw(x)
    return found if isinstance(found, torch.Tensor) else torch.tensor(found)


def load(at: Pointer, mask: Any = None, other: Any = 0) -> Value:
    if mask is None:
        assert ((at.at >= 0) & (at.at < at.memory.numel())).all(), "a load outside its tensor"
        return Value(at.memory[at.at])
    ok, where = torch.broadcast_tensors(tensor_of(mask), at.at)
    assert ((where >= 0) & (where < at.memory.numel()))[ok].all(), "a load outside its tensor"
    return Value(torch.where(ok, at.memory[torch.where(ok, where, 0)], tensor_of(other).to(at.memory.dtype)))


def store(at: Pointer, x: Any, mask: Any = None) -> None:
    values, where = torch.broadcast_tensors(tensor_of(x), at.at)
    ok = torch.ones_like(where, dtype=torch.bool) if mask is None else tensor_of(mask).expand_as(where)
    assert values.dtype == at.memory.dtype
    at.memory[where[ok]] = values[ok]
