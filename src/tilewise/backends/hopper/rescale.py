"""Rescaling the output accumulator when the running maximum has been raised, and only then.

That happens rarely once a row has seen a key (see `softmax_step`), so each warp checks its 16 rows first. The branch is
inside one piece of assembly: Gluon's own branches are taken by a whole role, whose warps would first have to agree.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _assembly(n):
    """n numbers of a thread ($0.. from $n..) in alternate pairs of its two rows, times $2n and $(2n + 2)."""
    first, second = 2 * n, 2 * n + 2
    lines = [
        ".reg .pred moved, any;",
        f"setp.neu.f32 moved, ${first}, 0f3F800000;",
        f"setp.neu.or.f32 moved, ${second}, 0f3F800000, moved;",
        "vote.sync.any.pred any, moved, -1;",
        *(f"mov.f32 ${i}, ${n + i};" for i in range(n)),
        "@!any bra.uni STILL_${:uid};",
        *(f"mul.f32 ${i}, ${i}, ${second if i & 2 else first};" for i in range(n)),
    ]
    return "{ " + " ".join(lines) + " STILL_${:uid}: }"


@gluon.constexpr_function
def _operands(n):
    return ",".join(["=f"] * n + ["f"] * 2 * n)


@gluon.jit
def rescale_output(o_tile, factor, C: gl.constexpr):
    """The accumulator [64, DV] of a warpgroup times a factor [64, 1] per row; a warp whose factors are all 1 skips it."""
    N: gl.constexpr = C.BLOCK_DV // 2  # numbers of a thread
    ASM: gl.constexpr = _assembly(N)
    OPERANDS: gl.constexpr = _operands(N)
    return gl.inline_asm_elementwise(ASM, OPERANDS, [o_tile, factor], dtype=gl.float32, is_pure=True, pack=N)
