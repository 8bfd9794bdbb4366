"""The kernel: shared memory, barriers, and the roles of its warps."""

from __future__ import annotations

from tilewise.backends.hopper.compat import fence_async_shared, gl, gluon
from tilewise.backends.hopper.consumer import consume
from tilewise.backends.hopper.draw import draw, make_drawn
from tilewise.backends.hopper.lists import make_words
from tilewise.backends.hopper.producer import produce
from tilewise.backends.hopper.quads import make_quad_ring
from tilewise.backends.hopper.ring import Rings, make_ring


@gluon.jit
def forward_kernel(q_desc, k_desc, v_desc, o_desc, a, C: gl.constexpr):
    UNITS: gl.constexpr = C.BLOCK_D // C.QK_UNIT if C.QK_UNIT > 0 else 1
    q_ring = make_ring(q_desc, C.Q_STAGES * C.WARPGROUPS, 1, UNITS)
    if C.QUADS:
        k_ring = make_quad_ring(k_desc, C.KV_STAGES, C.BLOCK_D, C.WARPGROUPS)
        v_ring = make_quad_ring(v_desc, C.KV_STAGES, C.BLOCK_DV, C.WARPGROUPS)
    else:
        k_ring = make_ring(k_desc, C.KV_STAGES, C.WARPGROUPS, UNITS)
        v_ring = make_ring(v_desc, C.KV_STAGES, C.WARPGROUPS)
    rings = Rings(q=q_ring, k=k_ring, v=v_ring, bias=(), drawn=make_drawn(C), listed=make_words(C.KV_STAGES, C))
    fence_async_shared()
    o_buffers = gl.allocate_shared_memory(o_desc.dtype, [C.WARPGROUPS, 1, 1, 64, C.O_COLUMNS], o_desc.layout)
    # constexprs among the arguments must be written in the call: through a variable they become numbers at run time
    if C.DRAWERS == 1:
        gl.warp_specialize(
            [
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(0), C)),
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(1), C)),
                (draw, (rings, a, gl.constexpr(0), C)),
                (produce, (q_desc, k_desc, v_desc, (), rings, a, C)),
            ],
            [4, 4, 1],
            [C.REGISTERS[0], C.DRAW_REGISTERS, C.REGISTERS[1]],
        )
    elif C.DRAWERS == 2:
        gl.warp_specialize(
            [
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(0), C)),
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(1), C)),
                (draw, (rings, a, gl.constexpr(0), C)),
                (draw, (rings, a, gl.constexpr(1), C)),
                (produce, (q_desc, k_desc, v_desc, (), rings, a, C)),
            ],
            [4, 4, 4, 1],
            [C.REGISTERS[0], C.DRAW_REGISTERS, C.DRAW_REGISTERS, C.REGISTERS[1]],
        )
    elif C.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(0), C)),
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(1), C)),
                (produce, (q_desc, k_desc, v_desc, (), rings, a, C)),
            ],
            [4, 1],
            [C.REGISTERS[0], C.REGISTERS[1]],
        )
    elif C.WARPGROUPS == 4:
        gl.warp_specialize(
            [
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(0), C)),
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(1), C)),
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(2), C)),
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(3), C)),
                (produce, (q_desc, k_desc, v_desc, rings, a, C)),
            ],
            [4, 4, 4, 1],
            [C.REGISTERS[0], C.REGISTERS[0], C.REGISTERS[0], C.REGISTERS[1]],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(0), C)),
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(1), C)),
                (consume, (o_desc, o_buffers, rings, a, gl.constexpr(2), C)),
                (produce, (q_desc, k_desc, v_desc, (), rings, a, C)),
            ],
            [4, 4, 1],
            [C.REGISTERS[0], C.REGISTERS[0], C.REGISTERS[1]],
        )


@gluon.jit
def biased_kernel(q_desc, k_desc, v_desc, b_desc, o_desc, a, C: gl.constexpr):
    """The same with a bias that comes through shared memory."""
    q_ring = make_ring(q_desc, C.Q_STAGES * C.WARPGROUPS, 1)
    k_ring = make_ring(k_desc, C.KV_STAGES, C.WARPGROUPS)
    v_ring = make_ring(v_desc, C.KV_STAGES, C.WARPGROUPS)
    b_ring = make_ring(b_desc, C.BIAS_STAGES * C.WARPGROUPS, 1)
    rings = Rings(q=q_ring, k=k_ring, v=v_ring, bias=(b_ring.tiles, b_ring.full, b_ring.empty), drawn=(), listed=())
    fence_async_shared()
    o_buffers = gl.allocate_shared_memory(o_desc.dtype, [C.WARPGROUPS, 1, 1, 64, C.O_COLUMNS], o_desc.layout)
    gl.warp_specialize(
        [
            (consume, (o_desc, o_buffers, rings, a, gl.constexpr(0), C)),
            (consume, (o_desc, o_buffers, rings, a, gl.constexpr(1), C)),
            (produce, (q_desc, k_desc, v_desc, (b_desc,), rings, a, C)),
        ],
        [4, 1],
        [C.REGISTERS[0], C.REGISTERS[1]],
    )
