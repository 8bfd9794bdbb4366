"""The JVP's kernel: shared memory, barriers, and the roles of its warps."""

from __future__ import annotations

from tilewise.backends.hopper.compat import fence_async_shared, gl, gluon
from tilewise.backends.hopper.jvp.consumer import consume
from tilewise.backends.hopper.jvp.producer import produce
from tilewise.backends.hopper.jvp.rings import JvpRings, make_twin
from tilewise.backends.hopper.ring import make_ring


@gluon.jit
def jvp_kernel(
    q_desc, k_desc, v_desc, q_t_desc, k_t_desc, v_t_desc, o_desc, o_t_desc, a, C: gl.constexpr
):
    q_ring = make_ring(q_desc, C.WARPGROUPS, 1)
    k_ring = make_ring(k_desc, C.KV_STAGES, C.WARPGROUPS)
    v_ring = make_ring(v_desc, C.KV_STAGES, C.WARPGROUPS)
    rings = JvpRings(
        q=q_ring,
        q_t=make_twin(q_desc, C.WARPGROUPS, C.Q_T),
        k=k_ring,
        k_t=make_twin(k_desc, C.KV_STAGES, C.K_T),
        v=v_ring,
        v_t=make_twin(v_desc, C.KV_STAGES, C.V_T),
    )
    fence_async_shared()
    o_buffers = gl.allocate_shared_memory(o_desc.dtype, [C.WARPGROUPS, 1, 1, 64, C.BLOCK_DV], o_desc.layout)
    # constexprs among the arguments must be written in the call: through a variable they become numbers at run time
    gl.warp_specialize(
        [
            (consume, (o_desc, o_t_desc, o_buffers, rings, a, gl.constexpr(0), C)),
            (consume, (o_desc, o_t_desc, o_buffers, rings, a, gl.constexpr(1), C)),
            (produce, (q_desc, k_desc, v_desc, q_t_desc, k_t_desc, v_t_desc, rings, a, C)),
        ],
        [4, 1],
        [C.REGISTERS[0], C.REGISTERS[1]],
    )
