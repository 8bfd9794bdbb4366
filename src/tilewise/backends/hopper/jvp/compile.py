"""Compiling the JVP's kernel, for the GPU at hand or for one that is not there."""

from __future__ import annotations

from typing import Any

from tilewise.backends.gpu.assemble import one_at_a_time
from tilewise.backends.hopper.compile import Types, descriptor_type
from tilewise.backends.hopper.jvp.config import JvpConfig


def tile_shapes(C: JvpConfig) -> dict[str, tuple[int, int] | None]:
    """Rows and columns of the tiles of the kernel's descriptors; None for a tangent that there is not."""
    q, k, v, o = (64, C.BLOCK_D), (C.BLOCK_N, C.BLOCK_D), (C.BLOCK_N, C.BLOCK_DV), (64, C.BLOCK_DV)
    moving = {"q_t_desc": q if C.Q_T else None, "k_t_desc": k if C.K_T else None, "v_t_desc": v if C.V_T else None}
    return {"q_desc": q, "k_desc": k, "v_desc": v, **moving, "o_desc": o, "o_t_desc": o}


def compile_jvp(target: Any, dtype: str, arguments: Any, config: JvpConfig) -> Any:
    """The kernel for arguments of which only the types matter, and a config."""
    import triton
    from triton.experimental.gluon._runtime import GluonASTSource

    from tilewise.backends.hopper.jvp.kernel import jvp_kernel

    types = Types(aligned=False)
    shapes = tile_shapes(config)
    signature: dict[str, Any] = {
        name: types.of(None, (i,)) if shape is None else descriptor_type(dtype, shape)
        for i, (name, shape) in enumerate(shapes.items())
    }
    signature |= {"a": types.of(arguments, (len(shapes),)), "C": "constexpr"}
    constants = {**types.constants, (len(shapes) + 1,): config}
    source = GluonASTSource(jvp_kernel, signature, constants, types.attributes)
    with one_at_a_time():
        return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": True})
