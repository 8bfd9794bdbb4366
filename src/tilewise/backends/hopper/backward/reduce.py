"""dQ added up in memory, one query tile at a time: in the order of the registers that hold it, four numbers at a time."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, mbarrier, warpgroup_mma
from tilewise.backends.hopper.operands import accumulator, columns, zeros


@gluon.jit
def issue_dq(k_tile, ds_ring, n, live, WG: gl.constexpr, C: gl.constexpr):
    """This warpgroup's part of dQ of the query tile before the n-th: half of the columns (64 queries) or rows (128).
    Where there was none before (not `live`), the result means nothing."""
    at = (n & 1) ^ 1
    mbarrier.wait(ds_ring.full.index(at), ((n - 1) >> 1) & 1, pred=live)
    ds_tile = ds_ring.tiles.index(at)
    OWN: gl.constexpr = C.DQ_PARTS[WG]
    zero = zeros(OWN)
    if C.BLOCK_M == 128:
        rows = ds_tile.slice(WG * 64, 64, dim=1).permute((1, 0))
        token = warpgroup_mma(rows, columns(k_tile, 0, OWN), zero, use_acc=False, is_async=True)
    else:
        part = k_tile.slice(WG * C.DQ_PARTS[0], OWN, dim=1)
        token = warpgroup_mma(ds_tile.permute((1, 0)), part, zero, use_acc=False, is_async=True)
    return token


@gluon.jit
def fragment_offsets(N: gl.constexpr):
    """Where an element of a [64, N] accumulator stands in register order: 16 bytes a thread, threads side by side."""
    LAYOUT: gl.constexpr = accumulator(N)
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))[None, :]
    return (r // 16) * 128 + (r % 8) * 16 + ((r // 8) % 2) * 2 + (c // 8) * 512 + ((c % 8) // 2) * 4 + (c % 2)


@gluon.jit
def reduce_dq(dq_tile, part, stat_tile, a, C: gl.constexpr):
    """Add a part of dQ, in memory, four numbers at a time. Each of the two parts of a tile has half of its memory."""
    offsets = fragment_offsets(dq_tile.type.shape[1])
    base = a.dq_ptr + stat_tile.to(gl.int64) * (C.BLOCK_M * C.BLOCK_D) + part * (C.BLOCK_M * C.BLOCK_D // 2)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8};\nmov.b32 $0, 0;",
        "=r,l,l,l,l,f,f,f,f",
        [(base + offsets).to(gl.int64), dq_tile],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )
