"""The Gluon language of the kernels: what they import of it, what differs between Triton 3.6 and 3.9, and what it lacks."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import core

__all__ = [
    "aggregate", "fence_async_shared", "gl", "gluon", "mbarrier", "named_barrier", "opaque", "opaque_float", "tma",
    "tma_load", "tma_store",
    "warpgroup_mma", "warpgroup_mma_wait", "warps_barrier",
]  # fmt: skip

_aggregate = getattr(gluon, "aggregate", None) or core._aggregate
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
warps_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Waits for the warps of one role."""

# Gluon has no named barriers of its own. Triton takes the numbers 0, 1 and 2 + role; these are used from 15 down.
PINGPONG_BARRIER = gl.constexpr(14)
"""And the next: warpgroup WG may issue its products (forward)."""
KV_READ_BARRIER = gl.constexpr(14)
"""Both warpgroups are done with K and V (backward, split)."""
ZEROED_BARRIER = gl.constexpr(15)
"""Both warpgroups have zeroed their part of a tile (backward)."""


def aggregate(cls: Any) -> Any:
    """A struct of device values, made with keywords. Its annotations are checked, so a module that has one does not import
    `annotations` from the future."""

    @gluon.constexpr_function
    def __init__(self, **fields):  # type: ignore[no-untyped-def]
        for name, value in fields.items():
            setattr(self, name, value)

    cls.__init__ = __init__
    return _aggregate(cls)


@gluon.constexpr_function
def _barrier(op, ident):
    return f"bar.{op} {ident}, 256; mov.u32 $0, 0;"


@gluon.jit
def named_barrier(OP: gl.constexpr, ID: gl.constexpr):
    """OP "sync" waits until both of two warpgroups have come, "arrive" does not wait."""
    ASM: gl.constexpr = _barrier(OP, ID)
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque(n):
    """The same number, but the compiler cannot know: what is computed from it is not kept in registers from before."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque_float(x):
    """The same for a number of fp32: its products with constants are not kept, either."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)
