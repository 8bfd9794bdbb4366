"""Compiling the kernels, for the GPU at hand or (in tests) for one that is not there."""

from __future__ import annotations

from typing import Any

from tilewise.backends.gpu.assemble import one_at_a_time
from tilewise.backends.hopper.structs import Plane, Unaligned

ELEMENT = {"float16": "fp16", "bfloat16": "bf16"}


def pointer(dtype: str) -> str:
    """The type of a pointer to elements of a tensor's dtype."""
    return f"*{ELEMENT[dtype]}"


def tile_shapes(name: str, C: Any) -> dict[str, Any]:
    """A kernel's descriptors: rows and columns of a tile, or the length of a vector of fp32."""
    keys: dict[str, Any] = {"k_desc": (C.BLOCK_N, C.BLOCK_D), "v_desc": (C.BLOCK_N, C.BLOCK_DV)}
    if name == "forward_kernel":
        width = C.QK_UNIT or C.BLOCK_D
        keys["k_desc"] = (C.BLOCK_N, width)
        if C.QUADS:
            keys = dict.fromkeys(keys, (C.BLOCK_N // 4, 2, 64))
        return {"q_desc": (64, width), **keys, "o_desc": (64, C.O_COLUMNS)}
    if name == "biased_kernel":
        plain = tile_shapes("forward_kernel", C)
        first = {key: plain[key] for key in ("q_desc", "k_desc", "v_desc")}
        return {**first, "b_desc": (64, C.BLOCK_N), "o_desc": plain["o_desc"]}
    if name == "queries_kernel":
        return {"q_desc": (64, C.BLOCK_D), "do_desc": (64, C.BLOCK_DV), **keys, "dq_desc": (64, C.BLOCK_D)}
    if name in ("keys_kernel", "split_kernel"):
        queries = {"q_desc": (C.BLOCK_M, C.BLOCK_D), "do_desc": (C.BLOCK_M, C.BLOCK_DV)}
        gradients = {"dk_desc": (64, C.BLOCK_D), "dv_desc": (64, C.BLOCK_DV)}
        return {**queries, **keys, "stats_desc": 2 * C.BLOCK_M, **gradients}
    return {}


def descriptor_type(dtype: str, shape: tuple[int, ...] | int) -> str:
    """With the layout in shared memory of a [1, 1, rows, columns] tile, or of a vector of fp32."""
    from triton.experimental.gluon import language as gl

    if isinstance(shape, int):
        return f"tensordesc<fp32[{shape}],{gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)!r}>"
    block = [1, 1, *shape]
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, dtype))
    return f"tensordesc<{ELEMENT[dtype]}{block},{layout!r}>"


class Types:
    """Types of nested arguments: a type's own text, numbers by kind (lengths are never specialised), None a constant."""

    def __init__(self, aligned: bool) -> None:
        self.aligned = aligned  # are pointers multiples of 16 bytes, strides of 8 elements?
        self.constants: dict[tuple[int, ...], Any] = {}
        self.attributes: dict[tuple[int, ...], Any] = {}

    def of(self, value: Any, path: tuple[int, ...]) -> Any:
        if value is None:
            self.constants[path] = None
            return "constexpr"
        if isinstance(value, str):
            if self.aligned and not isinstance(value, Unaligned):
                self.attributes[path] = [["tt.divisibility", 16]]
            return value
        if isinstance(value, Plane):
            for i in (1, 2, 3, 4):
                self.attributes[*path, i] = [["tt.divisibility", 8]]
            return Plane(self.of(value.ptr, (*path, 0)), "i64", "i64", "i64", "i32")  # type: ignore[arg-type]
        if isinstance(value, tuple):
            parts = [self.of(part, (*path, i)) for i, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, int | float):
            return "fp32" if isinstance(value, float) else "i32"
        return self.of("*i32", path)  # the order of tiles, already a tensor


def compile_kernel(target: Any, name: str, dtype: str, arguments: Any, config: Any) -> Any:
    """A kernel by name, for arguments of which only the types matter, and a config."""
    import triton
    from triton.experimental.gluon._runtime import GluonASTSource

    from tilewise.backends.hopper import kernel as forward
    from tilewise.backends.hopper.backward import kernel as backward
    from tilewise.backends.hopper.backward import prepost

    function = next(getattr(module, name) for module in (forward, backward, prepost) if hasattr(module, name))
    types = Types(aligned=function not in (forward.forward_kernel, forward.biased_kernel))
    shapes = tile_shapes(name, config)
    bias = {"fp16": "float16"}.get(config.BIAS.removesuffix("x2"), "bfloat16") if name == "biased_kernel" else dtype
    signature: dict[str, Any] = {
        key: descriptor_type(bias if key == "b_desc" else dtype, shape) for key, shape in shapes.items()
    }
    signature |= {"a": types.of(arguments, (len(shapes),)), "C": "constexpr"}
    constants = {**types.constants, (len(shapes) + 1,): config}
    source = GluonASTSource(function, signature, constants, types.attributes)
    with one_at_a_time():
        return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": True})
