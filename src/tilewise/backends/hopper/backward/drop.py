"""Dropout of a tile's weights and of their gradients, which takes the same bits for both.

Side by side, so that a bit becomes a predicate once and only one lives at a time. Tile after tile the compiler would keep 32 of
them, of the 7 that there are: it packs them into integers and takes those apart again, a hundred instructions more.
"""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon
from tilewise.backends.hopper.dropout import accumulator_parts, counted, parts_of, whole

DROP_BOTH = gl.constexpr(
    "{ .reg .pred kept; .reg .b32 own; and.b32 own, $4, $5; setp.ne.u32 kept, own, 0; "
    "selp.f32 $0, $2, 0f00000000, kept; selp.f32 $1, $3, 0f00000000, kept; }"
)


@gluon.jit
def dropped_both(p_tile, dp_tile, words):
    """Two tiles [64 keys, N queries] with 0 where a weight is dropped; `words` are those of `kept_by_column`."""
    N: gl.constexpr = p_tile.type.shape[1]
    LAYOUT: gl.constexpr = accumulator_parts(N)
    bit = 1 << (4 * counted(N // 8, 1, LAYOUT))
    p_parts, dp_parts = gl.inline_asm_elementwise(
        DROP_BOTH, "=&f,=&f,f,f,r,r", [parts_of(p_tile), parts_of(dp_tile), words[:, None, :, :], bit],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return whole(p_parts, N), whole(dp_parts, N)
