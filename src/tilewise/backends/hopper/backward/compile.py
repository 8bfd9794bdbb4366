"""Compiling the backward's kernels, for the GPU at hand or (in tests) for one that is not there."""

from __future__ import annotations

from typing import Any

from tilewise.backends.hopper.backward.structs import Plane
from tilewise.backends.hopper.compile import ELEMENT, descriptor_type

MATRICES: dict[str, Any] = {
    "keys_kernel": lambda C: {
        "q_desc": (C.BLOCK_M, C.BLOCK_D),
        "do_desc": (C.BLOCK_M, C.BLOCK_DV),
        "k_desc": (C.BLOCK_N, C.BLOCK_D),
        "v_desc": (C.BLOCK_N, C.BLOCK_DV),
        "stats_desc": 2 * C.BLOCK_M,
        "dk_desc": (64, C.BLOCK_D),
        "dv_desc": (64, C.BLOCK_DV),
    },
    "queries_kernel": lambda C: {
        "q_desc": (64, C.BLOCK_D),
        "do_desc": (64, C.BLOCK_DV),
        "k_desc": (C.BLOCK_N, C.BLOCK_D),
        "v_desc": (C.BLOCK_N, C.BLOCK_DV),
        "dq_desc": (64, C.BLOCK_D),
    },
    "prepare_kernel": lambda C: {},
    "cast_kernel": lambda C: {},
}
"""Descriptors of each kernel: rows and width of a tile, or the length of a vector of fp32."""
MATRICES["split_kernel"] = MATRICES["keys_kernel"]


def vector_layout() -> Any:
    """How a vector of fp32 lies in shared memory."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def vector_type(length: int) -> str:
    return f"tensordesc<fp32[{length}],{vector_layout()!r}>"


class Types:
    """Types of nested arguments: numbers by kind (lengths never specialised), pointers by their own text, None a constant."""

    def __init__(self) -> None:
        self.constants: dict[tuple[int, ...], Any] = {}
        self.attributes: dict[tuple[int, ...], Any] = {}

    def of(self, value: Any, path: tuple[int, ...]) -> Any:
        if value is None:
            self.constants[path] = None
            return "constexpr"
        if isinstance(value, str):
            self.attributes[path] = [["tt.divisibility", 16]]
            return value
        if isinstance(value, Plane):
            for i in (1, 2, 3, 4):
                self.attributes[*path, i] = [["tt.divisibility", 8]]
            return Plane(self.of(value.ptr, (*path, 0)), "i64", "i64", "i64", "i32")  # type: ignore[arg-type]
        if isinstance(value, tuple):
            parts = [self.of(part, (*path, i)) for i, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return "fp32" if isinstance(value, float) else "i32"


def compile_for(target: Any, name: str, dtype: str, arguments: Any, config: Any) -> Any:
    """A kernel by name, for arguments of which only the shape matters, and a config."""
    import triton
    from triton.experimental.gluon._runtime import GluonASTSource

    from tilewise.backends.hopper.backward import edges, kernel

    function = getattr(kernel, name, None) or getattr(edges, name)
    tiles = MATRICES[name](config)
    types = Types()
    signature: dict[str, Any] = {
        key: vector_type(shape) if isinstance(shape, int) else descriptor_type(dtype, *shape)
        for key, shape in tiles.items()
    }
    signature |= {"a": types.of(arguments, (len(tiles),)), "C": "constexpr"}
    constants = {**types.constants, (len(tiles) + 1,): config}
    source = GluonASTSource(function, signature, constants, types.attributes)
    return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": True})


def pointer(dtype: str) -> str:
    """The type of a pointer to elements of a tensor's dtype."""
    return f"*{ELEMENT[dtype]}"
