"""dQ added up in memory: each tile in the order of the registers that hold it, four numbers at a time."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, opaque
from tilewise.backends.hopper.operands import accumulator


@gluon.jit
def fragment_offsets(N: gl.constexpr, zero=0):
    """Where an element of a [64, N] accumulator stands in register order: 16 bytes a thread, threads side by side. The thread's
    part is computed with `zero`."""
    LAYOUT: gl.constexpr = accumulator(N)
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))[None, :]
    thread = (r // 16) * 128 + (r % 8) * 16 + ((c % 8) // 2) * 4 + zero
    return thread.to(gl.uint32).to(gl.int64) + ((r // 8) % 2) * 2 + (c // 8) * 512 + (c % 2)


@gluon.jit
def reduce_dq(dq_tile, part, stat_tile, a, C: gl.constexpr):
    """Add a part of dQ, in memory, four numbers at a time. Each of the two parts of a tile has half of its memory."""
    # opaque: else the thread's part is kept with 64 bits, in one register more than there are
    offsets = fragment_offsets(dq_tile.type.shape[1], opaque(stat_tile * 0))
    base = a.dq_ptr + stat_tile.to(gl.int64) * (C.BLOCK_M * C.BLOCK_D) + part * (C.BLOCK_M * C.BLOCK_D // 2)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8};\nmov.b32 $0, 0;",
        "=r,l,l,l,l,f,f,f,f",
        [(base + offsets).to(gl.int64), dq_tile],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )
