"""Compiling the kernel, for the GPU at hand or (in tests) for one that is not there."""

from __future__ import annotations

from typing import Any

from tilewise.backends.hopper.config import Config
from tilewise.backends.hopper.structs import Arguments, Divisor, Rows, Term

ELEMENT = {"float16": "fp16", "bfloat16": "bf16"}


def tile_layout(dtype: str, rows: int, width: int) -> Any:
    """How a [1, 1, rows, width] tile lies in shared memory."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], getattr(gl, dtype))


def descriptor_type(dtype: str, rows: int, width: int) -> str:
    return f"tensordesc<{ELEMENT[dtype]}[1, 1, {rows}, {width}],{tile_layout(dtype, rows, width)!r}>"


def argument_types(dtype: str, a: Arguments) -> tuple[Arguments, dict[tuple[int, ...], Any]]:
    """Types of the arguments, absent ones as constants. Lengths are never specialised, so they never recompile."""
    constants: dict[tuple[int, ...], Any] = {}
    place = 4  # after the descriptors
    terms = []
    for t, term in enumerate(a.terms):
        for f in range(4, 7):
            if term[f] is None:
                constants[place, Arguments._fields.index("terms"), t, f] = None
        pointers = ["constexpr" if pointer is None else "*i32" for pointer in term[4:]]
        terms.append(Term("i32", "i32", "i32", "i32", *pointers))  # type: ignore[arg-type]
    for name in ("cu_q", "cu_k", "order"):
        if getattr(a, name) is None:
            constants[place, Arguments._fields.index(name)] = None
    divisor = Divisor("i32", "i32", "i32")  # type: ignore[arg-type]
    vectors = ["constexpr" if x is None else "*i32" for x in (a.cu_q, a.cu_k, a.order)]
    out: Any = Rows(f"*{ELEMENT[dtype]}", "i64", "i64", "i32")  # type: ignore[arg-type]
    if a.out is None:
        constants[place, Arguments._fields.index("out")] = None
        out = "constexpr"
    types = Arguments("*fp32", *vectors, out, tuple(terms), *[divisor] * 3, *["i32"] * 7, "fp32", "fp32")  # type: ignore[arg-type]
    return types, constants


def compile_for(target: Any, dtype: str, a: Arguments, config: Config) -> Any:
    """The kernel for these arguments, of which only the shape matters, and this config."""
    import triton
    from triton.experimental.gluon._runtime import GluonASTSource

    from tilewise.backends.hopper.kernel import forward_kernel

    types, constants = argument_types(dtype, a)
    rows = {"q_desc": (64, config.BLOCK_D), "k_desc": (config.BLOCK_N, config.BLOCK_D)}
    rows |= {"v_desc": (config.BLOCK_N, config.BLOCK_DV), "o_desc": (64, config.OUT_WIDTH)}
    signature: dict[str, Any] = {name: descriptor_type(dtype, *shape) for name, shape in rows.items()}
    signature |= {"a": types, "C": "constexpr"}
    source = GluonASTSource(forward_kernel, signature, {**constants, (5,): config})
    return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": True})
