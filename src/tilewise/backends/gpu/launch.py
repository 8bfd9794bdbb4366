"""Compiling and launching kernels whose arguments are structs.

Triton's own dispatcher specialises every integer inside a tuple (on 1 and on multiples of 16), so sequence lengths would
recompile kernels. Here the signature is stated instead: lengths and mask integers are plain i32, strides carry only what
loads need (an inner stride of 1, a common alignment). The same function gives the compile tests their signatures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch

from tilewise.backends.gpu.assemble import compile_soundly, proven
from tilewise.backends.gpu.compiled import Kernels
from tilewise.backends.gpu.structs import View

T = TypeVar("T")
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
WIDE_STRIDE = 1 << 21
"""Row strides from here on are 64-bit: 512 rows or more of a tile would leave 32 bits."""


class LaunchOptions(NamedTuple):
    """How a kernel is launched."""

    num_warps: int = 4
    num_stages: int = 2
    early: bool = False  # launched before the kernel in front of it has ended, for which it waits itself


class Address:
    """Memory some bytes behind the start of a tensor; without one, an address."""

    __slots__ = ("base", "bytes")

    def __init__(self, distance: int, base: torch.Tensor | None = None) -> None:
        self.base, self.bytes = base, distance

    def data_ptr(self) -> int:
        return self.bytes if self.base is None else self.base.data_ptr() + self.bytes

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        assert self.base is not None
        return self.base.dtype


class Part(Address):
    """A tensor of rank 4, its numbers side by side, some bytes behind the start of a tensor of the same dtype."""

    __slots__ = ("shape",)

    def __init__(self, distance: int, base: torch.Tensor, shape: torch.Size) -> None:
        super().__init__(distance, base)
        self.shape = shape

    def stride(self) -> tuple[int, ...]:
        _, h, s, d = self.shape
        return h * s * d, s * d, d, 1

    def element_size(self) -> int:
        assert self.base is not None
        return self.base.element_size()


class Descriptor:
    """A tensor map for Triton's launcher, which reads just these fields."""

    __slots__ = ("base", "block_shape", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Any, shape: list[int], strides: list[int], block_shape: list[int]) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.padding, self.round_f32_to_tf32 = "zero", False

    @classmethod
    def of(cls, x: torch.Tensor | Part, rows: int, width: int) -> Descriptor:
        """Of a tensor of rank 4, read in tiles of rows × width."""
        # a dimension of size 1 is never stepped over; any legal stride will do
        strides = [
            max(8, x.shape[3]) * 16 if size == 1 else step
            for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)
        ]
        return cls(x, list(x.shape), [*strides, 1], [1, 1, rows, width])

    def at(self, address: int) -> Descriptor:
        """The same map over other memory."""
        return Descriptor(Address(address), self.shape, self.strides, self.block_shape)


APART = ("bias", "dbias", "alibi")
"""Views whose rows are aligned or not whatever those of q, k and v are: a row is as long as there are keys, or one slope."""


class Signature(NamedTuple):
    types: Any
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]


@cache
def interpreting() -> bool:
    """Do kernels run in Triton's interpreter, on CPU tensors? Triton decides it once for a process, too."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def on_device(device: torch.device, function: Callable[..., T], *args: Any) -> T:
    """Call a function with a tensor's device as the current one: kernels are launched there."""
    if device.type != "cuda" or device.index is None or device.index == torch._C._cuda_getDevice():
        return function(*args)
    with torch.cuda.device(device):
        return function(*args)


EARLY_SINCE, GRAPHS_SINCE = (9, 0), 12030
"""Capability and driver: such launches are captured in CUDA graphs since CUDA 12.3."""


def takes_early(capability: tuple[int, int] | None) -> bool:
    """Can kernels be launched before the one in front of them has ended?"""
    if capability is None or capability < EARLY_SINCE or on_hip() or not torch.cuda.is_available():
        return False
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)
    return int(version()) >= GRAPHS_SINCE


def on_hip() -> bool:
    """Is this torch built for GPUs of AMD?"""
    return torch.version.hip is not None


def broadcast_strides(x: torch.Tensor | Part) -> list[int]:
    """Strides, 0 for sides of 1."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def view(x: torch.Tensor | Part) -> View:
    """A rank 4 tensor; dimensions of size 1 get stride 0, so that a mere shape never changes the signature."""
    b, h, rows, d = broadcast_strides(x)
    return View(x, b, h, rows, 1 if x.shape[3] == 1 else d)


def bias_view(x: torch.Tensor) -> View:
    """A tensor each of whose dimensions is full or 1; those of size 1 broadcast."""
    return View(x, *broadcast_strides(x))


def describable(x: torch.Tensor) -> bool:
    """Can a tensor map describe it? Adjacent elements, rows at multiples of 16 bytes, nothing broadcast."""
    unit = 16 // x.element_size()
    strides = [step for size, step in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    adjacent = x.stride(3) == 1 and x.shape[3] % unit == 0
    return (
        x.numel() > 0 and adjacent and x.data_ptr() % 16 == 0 and all(step > 0 and step % unit == 0 for step in strides)
    )


def signature(args: tuple[Any, ...]) -> Signature:
    """Types, compile-time constants and alignment of the arguments before the config."""
    result = Signature([], {}, {})
    aligned = _all_aligned(args)
    types = tuple(_describe(arg, (i,), aligned, result) for i, arg in enumerate(args))
    return result._replace(types=types)


def _describe(value: Any, path: tuple[int, ...], aligned: bool, into: Signature) -> Any:
    if value is None:
        into.constants[path] = None
        return "constexpr"
    if isinstance(value, View):
        return _describe_view(value, path, aligned, into)
    if isinstance(value, tuple):
        parts = [
            _describe(part, (*path, i), _aligned(part) if part is not None and name in APART else aligned, into)
            for i, (name, part) in enumerate(_named(value))
        ]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, Descriptor):
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}[{', '.join(map(str, value.block_shape))}]>"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if value.data_ptr() % 16 == 0:
        into.attributes[path] = [["tt.divisibility", 16]]
    return POINTERS[value.dtype]


def _describe_view(value: View, path: tuple[int, ...], aligned: bool, into: Signature) -> View:
    pointer = _describe(value.ptr, (*path, 0), aligned, into)
    if aligned:
        for i in (1, 2, 3):
            into.attributes[(*path, i)] = [["tt.divisibility", 16 // value.ptr.element_size()]]
    if value.stride_d == 1:
        into.constants[(*path, 4)] = 1
    inner = "constexpr" if value.stride_d == 1 else "i64"
    return View(pointer, "i64", "i64", "i32" if abs(value.stride_s) < WIDE_STRIDE else "i64", inner)  # type: ignore[arg-type]


def _all_aligned(args: tuple[Any, ...]) -> bool:
    """Do all rows of all views start at multiples of 16 bytes? One fact for those of a whole kernel keeps its variants few."""
    named = (pair for arg in args if isinstance(arg, tuple) for pair in _named(arg))
    return all(_aligned(v) for name, v in named if isinstance(v, View) and name not in APART)


def _named(value: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The fields of a struct; those of a plain tuple have no names."""
    return zip(getattr(value, "_fields", None) or ("",) * len(value), value, strict=True)


def _aligned(v: View) -> bool:
    unit = 16 // v.ptr.element_size()
    return v.ptr.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in v[1:4])


_compiled = Kernels("triton")


def compiled_kernel(kernel: Any, args: tuple[Any, ...], config: Any, options: LaunchOptions) -> Any:
    """The kernel for these arguments, compiled once for each device and signature."""
    from triton.runtime import driver

    sig = signature(args)
    device = driver.active.get_current_device()
    key = (kernel, sig.types, tuple(sig.constants.items()), str(sig.attributes), config, options, device)
    target = driver.active.get_current_target()
    make = partial(compile_by_name, target, (kernel.__module__, kernel.__name__), sig, config, options)
    return _compiled.get(key, kernel.__name__, make)


def compile_by_name(target: Any, name: tuple[str, str], sig: Signature, config: Any, options: LaunchOptions) -> Any:
    """Compile a kernel by its module and name in it, as another process can."""
    return compile_for(target, getattr(import_module(name[0]), name[1]), sig, config, options)


def compile_for(target: Any, kernel: Any, sig: Signature, config: Any, options: LaunchOptions) -> Any:
    """Compile for a target, which need not be present."""
    import triton
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = dict(zip(names, (*sig.types, "constexpr"), strict=True))
    # deepest first: triton 3.6 learns of a constant inside a struct only when the struct itself is set again, as by a None in it
    inside_out = sorted(sig.constants.items(), key=lambda item: -len(item[0]))
    constants = {**dict(inside_out), (len(names) - 1,): config}
    source = ASTSource(kernel, types, constants, sig.attributes)
    settings = {"num_warps": options.num_warps, "num_stages": options.num_stages, "enable_fp_fusion": True}
    settings |= {"launch_pdl": True} if options.early else {}

    def build(more: dict[str, str]) -> Any:
        return triton.compile(source, target=target, options=settings | more)

    return compile_soundly(target, not proven(sig.types, sig.attributes, config), build)
