"""A kernel's view of its arguments and of its thread's scratch memory: structs of 64-bit fields behind a pointer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.ir import F32, F64, I8, I32, I64, PTR, REALS, STORAGE, Pointer, Value
from tilewise.backends.cpu.spec import DOUBLES, STATISTICS, Kernel

STORED = ("q", "k", "v", "o", "do", "dq", "qt", "kt", "vt", "ot")
REAL = (
    *("lse", "sinks", "alibi", "work", "dlse", "delta", "dk", "dv", "dbias"),
    *("lse_t", "delta_t", "sinks_t", "mass", "top_weights", *chain(*STATISTICS.values())),
)
I64_ARRAYS = ("counter", "done", "progress", "top_indices")
I32_ARRAYS = ("cu_q", "cu_k", "origins", "entries", "starts", "lengths", "order")
"""Pointers by the type of what they point to; `bias` has a dtype of its own."""


class ArgBlock:
    """Fields as attributes: `args.scale` emits a load, `frame.n0 = x` a store. `kinds` gives the pointers' element types."""

    def __init__(self, e: Emit, pointer: Pointer, names: tuple[str, ...], kinds: Mapping[str, tuple[Any, str]]) -> None:
        offsets = {name: n for n, name in enumerate(names)}
        self.__dict__.update(e=e, pointer=pointer.of(I64), offsets=offsets, kinds=kinds)

    def __getattr__(self, name: str) -> Any:
        if name not in self.offsets:
            raise AttributeError(name)
        if f"{name}_s" in self.offsets:
            return TensorArg(self, name, *self.kinds[name])
        if name in self.kinds:
            return self.address(name, *self.kinds[name])
        if name in DOUBLES:  # a number in the kernel's Real type, passed as a double
            value = self.pointer.of(F64)[self.offsets[name]]
            return value if self.e.real.type == F64 else value.fptrunc(self.e.real.type)
        return self.integer(name)

    def __setattr__(self, name: str, value: int | Value) -> None:
        self.pointer[self.offsets[name]] = value

    def integer(self, name: str) -> Any:
        return self.pointer[self.offsets[name]]

    def address(self, name: str, kind: Any, dtype: str = "") -> Pointer:
        raw = self.e.ir.load((self.pointer + self.offsets[name]).raw, typ=PTR, align=8)
        return Pointer(self.e, raw, kind, dtype)

    def given(self, name: str) -> Any:
        """Is the pointer not null?"""
        return self.integer(name) != 0

    def mask_int(self, n: int) -> Any:
        return self.integer(f"mask_i{n}")

    def mask_tensor(self, n: int, kind: Any = I32) -> TensorArg:
        return TensorArg(self, f"mask_t{n}", kind)


class TensorArg:
    """A tensor: `pointer`, and strides in elements: `stride_b`, `stride_h`, `stride_s`, `stride_d`, or by number."""

    def __init__(self, args: ArgBlock, name: str, kind: Any, dtype: str = "") -> None:
        self.args, self.name, self.kind, self.dtype = args, name, kind, dtype

    @property
    def pointer(self) -> Pointer:
        return self.args.address(self.name, self.kind, self.dtype)

    def __getattr__(self, name: str) -> Any:
        return self.args.integer(f"{self.name}_{name.removeprefix('stride_')}")


def pointer_kinds(kernel: Kernel) -> dict[str, tuple[Any, str]]:
    """(LLVM type, dtype) of what the arguments point to."""
    real = REALS[kernel.real].type
    kinds = dict.fromkeys(STORED, (STORAGE[kernel.dtype], kernel.dtype)) | dict.fromkeys(REAL, (real, ""))
    kinds |= {"classes": (I8, "")} | dict.fromkeys(I64_ARRAYS, (I64, "")) | dict.fromkeys(I32_ARRAYS, (I32, ""))
    if kernel.partial:
        kinds["o"] = (STORAGE[kernel.out], kernel.out)
    if kernel.paged:
        stored = kernel.stored or kernel.dtype
        kinds |= dict.fromkeys(("k", "v"), (STORAGE[stored], stored)) | dict.fromkeys(("k_scale", "v_scale"), (F32, "float32"))
    return kinds | dict.fromkeys(("bias", "bias_t"), (STORAGE[kernel.bias or "float32"], kernel.bias))
