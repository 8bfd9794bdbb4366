"""The backward's kernels: shared memory, barriers, and the roles of their warps."""

from __future__ import annotations

from tilewise.backends.hopper.backward.keys import consume_keys
from tilewise.backends.hopper.backward.producer import produce_for_keys, produce_for_queries
from tilewise.backends.hopper.backward.queries import consume_queries
from tilewise.backends.hopper.backward.split import consume_split
from tilewise.backends.hopper.compat import fence_async_shared, gl, gluon
from tilewise.backends.hopper.lists import make_words
from tilewise.backends.hopper.ring import GradRings, KeyRings, Ring, make_barriers, make_follower, make_ring


@gluon.jit
def make_scores(dtype: gl.constexpr, N: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr):
    """Tiles [N, M] that warpgroups write for one another: dS as an operand, or weights in fp32."""
    if dtype == gl.float32:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    else:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], dtype)
    return gl.allocate_shared_memory(dtype, [STAGES, N, M], LAYOUT)


@gluon.jit
def keys_kernel(q_desc, do_desc, k_desc, v_desc, stats_desc, dk_desc, dv_desc, a, C: gl.constexpr):
    """dK and dV of 128 keys at a time, 64 for each of two warpgroups, and their part of dQ."""
    DTYPE: gl.constexpr = q_desc.dtype
    q_ring = make_ring(q_desc, C.Q_STAGES, 2)
    do_ring = make_follower(do_desc, q_ring, C.Q_STAGES)
    k_ring = make_ring(k_desc, C.K_STAGES, 2)
    v_ring = make_ring(v_desc, C.V_STAGES, 2)
    stats = gl.allocate_shared_memory(gl.float32, [C.Q_STAGES, 2 * C.BLOCK_M], stats_desc.layout)
    if C.REDUCE_DQ:
        ds_tiles = make_scores(DTYPE, C.BLOCK_N, C.BLOCK_M, 2)
        ds_ring = Ring(tiles=ds_tiles, full=make_barriers(2, 2), empty=q_ring.empty)
    else:
        ds_ring = q_ring
    listed = make_words(C.Q_STAGES, C)
    loaded = GradRings(q=q_ring, do=do_ring, k=k_ring, v=v_ring, listed=listed)
    rings = KeyRings(q=q_ring, do=do_ring, k=k_ring, v=v_ring, exchange=ds_ring, stats=stats, listed=listed)
    dk_buffers = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, C.BLOCK_D], dk_desc.layout)
    if C.BLOCK_D == C.BLOCK_DV:
        dv_buffers = dk_buffers
    else:
        dv_buffers = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, C.BLOCK_DV], dv_desc.layout)
    fence_async_shared()
    # constexprs among the arguments must be written in the call: through a variable they become numbers at run time
    gl.warp_specialize(
        [
            (consume_keys, (dk_desc, dv_desc, dk_buffers, dv_buffers, rings, a, gl.constexpr(0), C)),
            (consume_keys, (dk_desc, dv_desc, dk_buffers, dv_buffers, rings, a, gl.constexpr(1), C)),
            (produce_for_keys, (q_desc, do_desc, k_desc, v_desc, stats_desc, loaded, stats, a, C)),
        ],
        [4, 1],
        [C.REGISTERS[0], C.REGISTERS[1]],
    )


@gluon.jit
def split_kernel(q_desc, do_desc, k_desc, v_desc, stats_desc, dk_desc, dv_desc, a, C: gl.constexpr):
    """dK and dV of 64 keys at a time, dV by the first warpgroup and dK by the second."""
    q_ring = make_ring(q_desc, C.Q_STAGES, 2)
    do_ring = make_ring(do_desc, C.Q_STAGES, 2)
    k_ring = make_ring(k_desc, 1, 1)
    v_ring = make_ring(v_desc, 1, 1)
    stats = gl.allocate_shared_memory(gl.float32, [C.Q_STAGES, 2 * C.BLOCK_M], stats_desc.layout)
    weights = make_scores(gl.float32, C.BLOCK_N, C.BLOCK_M, 1)
    w_ring = Ring(tiles=weights, full=make_barriers(1, 1), empty=make_barriers(1, 1))
    listed = make_words(C.Q_STAGES, C)
    loaded = GradRings(q=q_ring, do=do_ring, k=k_ring, v=v_ring, listed=listed)
    rings = KeyRings(q=q_ring, do=do_ring, k=k_ring, v=v_ring, exchange=w_ring, stats=stats, listed=listed)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume_split, (dv_desc, rings, a, gl.constexpr(0), C)),
            (consume_split, (dk_desc, rings, a, gl.constexpr(1), C)),
            (produce_for_keys, (q_desc, do_desc, k_desc, v_desc, stats_desc, loaded, stats, a, C)),
        ],
        [4, 1],
        [C.REGISTERS[0], C.REGISTERS[1]],
    )


@gluon.jit
def queries_kernel(q_desc, do_desc, k_desc, v_desc, dq_desc, a, C: gl.constexpr):
    """dQ of 128 queries at a time, 64 for each of two warpgroups."""
    q_ring = make_ring(q_desc, 2, 1)
    do_ring = make_ring(do_desc, 2, 1)
    k_ring = make_ring(k_desc, C.K_STAGES, 2)
    v_ring = make_ring(v_desc, C.V_STAGES, 2)
    rings = GradRings(q=q_ring, do=do_ring, k=k_ring, v=v_ring, listed=make_words(C.K_STAGES, C))
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume_queries, (dq_desc, rings, a, gl.constexpr(0), C)),
            (consume_queries, (dq_desc, rings, a, gl.constexpr(1), C)),
            (produce_for_queries, (q_desc, do_desc, k_desc, v_desc, rings, a, C)),
        ],
        [4, 1],
        [C.REGISTERS[0], C.REGISTERS[1]],
    )
