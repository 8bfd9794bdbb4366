"""The scratch memory of a call, and blocks small enough for it.

A call may take ROOM for each thread and SHARED for all of them together. A thread's frame holds, of one block, Q and O (or Q, dO
and dQ) and the packed K and V: `buffers` is the one table of their sizes, for the host that allocates a frame and for the
kernels that lay it out. Where the keys are split, each split leaves its partial m, l and O in a workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

from tilewise.backends.cpu.spec import (
    ACCUMULATORS,
    ALIGN,
    BYTE_COLUMNS,
    FRAME_BYTES,
    TILE_KEYS,
    TILE_SIDE,
    Kernel,
    round_up,
)
from tilewise.problem import Problem

ROOM = 1 << 20
SHARED = 3 << 20
"""Bytes. A fourth mebibyte for all is left to arguments, statistics and what the system adds."""
STASH = 6 << 20
STASHED = 4
"""Bytes of a thread of the double backward, beside its frame, for so many matrices of a block of rows by all keys."""
STASH_ROWS = 32
"""Of a block at least, or packing K and V for it costs as much as a stash saves."""
COSTS = {False: (10.0, 1.0), True: (35.0, 10.0)}
"""What a block of rows and a block of keys cost beside their products (packing, and sums read and written once for each), in
rows and keys; on vectors, and on matrix tiles, where products take less time. Neoverse N1, fp32, head dims 256 and 512, forward
and backward: 9 to 11 and 0.5 to 1.2. Xeon with AMX, bf16: from 64, 128 and 256 keys, and from 256 × 64 and 512 × 128."""
LEAST_KEYS = DECODE_KEYS = 16
LIST_ROWS = 128


class Tiles(NamedTuple):
    """Blocks of one call: query rows of a task (of each head), keys of a block, query blocks of the longest sequence."""

    rows: int
    keys: int
    blocks: int
    splits: int
    tasks: int
    threads: int
    heads: int = 1
    """Query heads of a task: of one group, and a divisor of it."""
    groups: int = 1
    """Groups that a task decodes together, each with K and V of its own."""


def class_rows(strip: int) -> int:
    """Rows of the tiles that a mask is classified by: whole strips, and where they divide it, as many as lists usually share."""
    return LIST_ROWS if LIST_ROWS % strip == 0 else strip


def grain(kernel: Kernel) -> tuple[int, int]:
    """Blocks have so many rows and keys, or multiples. Decoding computes the scores of several keys at once, and exponentiates a
    vector of them: two vectors, where they are short. Matrix tiles sum over so many at once."""
    tile = kernel.tile
    least = TILE_KEYS if kernel.matrix else max(ACCUMULATORS // tile.keys, min(2 * tile.lanes, DECODE_KEYS))
    return (1, least) if kernel.kind == "decode" else (tile.rows, tile.keys)


def paddings(problem: Problem, kernel: Kernel, tiles: Tiles) -> dict[str, int]:
    """Head dims as register tiles take them, and the distance of two rows of P."""
    J, R = kernel.tile.keys, kernel.tile.rows
    d, dv = problem.head_dim, problem.head_dim_v
    # rows of P and dS lie a cache line more apart than they are long: a power of two would put a column into few sets of L1
    apart = tiles.rows + (2 * ALIGN if kernel.matrix else ALIGN)
    return {"DP": round_up(d, J), "DVP": round_up(dv, J), "DR": round_up(d, R), "DVR": round_up(dv, R), "PS": apart}


def buffers(kernel: Kernel, sizes: Any, larger: Callable[[Any, Any], Any] = max) -> dict[str, Any]:
    """Elements of each buffer of a frame, in the order in which they lie, in cells of the Real type.

    `sizes` has the arguments BM, BN, D, Dv, DP, … as attributes: numbers on the host, values in generated code, for which
    `larger` is the maximum.
    """
    tile, R = kernel.tile, kernel.tile.rows

    def packed(rows: Any, columns: Any) -> Any:
        """Matrix tiles hold pairs of 16-bit values."""
        return rows * columns // 2 if kernel.matrix else rows * columns

    # offsets of the rows of K and V, 64-bit integers; decoding looks a block of K ahead, or some rows
    offsets = {"k_rows": sizes.BN * 4, "v_rows": sizes.BN * 2 + ALIGN} if kernel.paged else {}
    if kernel.stored:
        offsets |= {"k_scales": sizes.BN + ALIGN, "v_scales": sizes.BN + ALIGN}
    if kernel.kind == "decode":
        rows = round_up(sizes.group, tile.keys)
        scores = {"P": larger(rows * sizes.BN, sizes.Dv + ALIGN)}  # of a block, or its state
        if kernel.weighs_bytes:
            # a tile is loaded with rows that mean nothing
            digits = rows * kernel.weight_limbs + (TILE_SIDE if kernel.matrix else 0)
            offsets |= {"P8": digits * (round_up(sizes.BN, BYTE_COLUMNS) // 4), "p_unit": rows}
        if kernel.matrix:  # bytes of K and V as tiles take them, addresses of tiles; tiles of sums, of four or of a row of O
            offsets |= {"K_near": sizes.BN * sizes.D // 4, "V_fours": sizes.BN * sizes.Dv // 4}
            offsets |= {"k_tiles": sizes.BN * 4 // TILE_SIDE, "sums": larger(4 * TILE_SIDE, sizes.Dv) * TILE_SIDE}
        rows = rows * sizes.together if kernel.together else rows
        if kernel.bytes:
            offsets |= {"Q8": rows * sizes.D * kernel.digit_cells, "q_unit": rows, "q_low": rows}
        return {"Q": rows * sizes.D, "O": rows * sizes.Dv, "m": rows, "l": rows} | scores | offsets
    BM, BN, DP, DVP = sizes.BM, sizes.BN, sizes.DP, sizes.DVP
    if kernel.kind in ("forward", "jvp"):
        rows = BM * sizes.group
        state = {"Q": packed(rows, DP), "O": rows * DVP, "m": rows, "l": rows}
        strip = {"P": BN * R, "W": BN * R, "row_max": R, "alpha": R, "q_factors": BM}
        norms = {} if kernel.matrix else {"q_norm": rows, "max_k_norm": 1}
        weights = {"row_sum": R} | ({"pairs": BN * (R // 2)} if kernel.matrix else {})
        if kernel.kind == "jvp":
            weights |= {"Qt": rows * DP, "Ot": rows * DVP, "l_t": rows, "T": BN * R, "Kt": BN * DP, "Vt": BN * DVP}
        watched = {"top": rows, "spread": rows, "row_spread": R, "shift": R} if kernel.stats else {}
        if kernel.invariant:  # of the parts before
            state |= {"O_before": rows * DVP, "m_before": rows, "l_before": rows}
        return state | strip | {"K": packed(BN, DP), "V": packed(BN, DVP)} | norms | weights | watched | offsets
    if kernel.kind == "sweep":
        rows, block = {"lse2": BM, "q_factors": BM, "top_s": BM * sizes.top, "top_i": BM * sizes.top * 2}, {"K": BN * DP}
        return {"Q": BM * DP, "P": BN * R, "W": BN * R} | rows | block | {"key_sums": BN}
    operands = {"Q": packed(BM, DP), "dO": packed(BM, DVP), "Q_panels": packed(BM, sizes.DR)}
    operands |= {"dO_panels": packed(BM, sizes.DVR), "dQ": BM * DP, "P": packed(BN, sizes.PS), "dS": packed(BN, sizes.PS)}
    products = {"S": BN * R, "dP": BN * R, "pairs": BN * (R // 2)} if kernel.matrix else {}
    rows = {"lse2": BM, "delta": BM, "do_factors": BM, "ds_factors": BM} | ({"slight": BM} if kernel.double else {})
    rows |= {"dentropy": BM, "mean": BM} if kernel.stats else {}
    tiles = {"K": packed(BN, DP), "V": packed(BN, DVP), "K_columns": packed(BN, DP)}
    # first and past key of each strip: 64-bit integers, at most twice as large as a cell
    ends = {"first": BM * 2, "past": BM * 2} | ({} if kernel.matrix else {"q_factors": BM})
    if kernel.kind == "double_backward":
        tiles |= {"Kt": BN * DP, "Vt": BN * DVP, "Kt_columns": BN * DP, "Qt": BM * DP, "Qt_panels": BM * sizes.DR}
        tiles |= {"moved": BN * sizes.PS, "dPt": BN * sizes.PS, "lse_t": BM, "delta_t": BM, "slight": BM}
    return operands | products | {"kept": BN * R, "W": BN * R} | rows | {"tail": tile.keys * R} | tiles | ends


def layout(problem: Problem, kernel: Kernel, tiles: Tiles) -> dict[str, int]:
    """Bytes of a thread's frame, by buffer; its fields come first."""
    known = {"D": problem.head_dim, "Dv": problem.head_dim_v, "BM": tiles.rows, "BN": tiles.keys, "group": tiles.heads}
    known |= {"together": tiles.groups, "top": problem.top}
    sizes = SimpleNamespace(**known, **paddings(problem, kernel, tiles))
    size = _size(kernel)
    return {"fields": FRAME_BYTES} | {name: round_up(n, ALIGN) * size for name, n in buffers(kernel, sizes).items()}


def frame(problem: Problem, kernel: Kernel, tiles: Tiles) -> int:
    """Bytes of a thread's frame."""
    return sum(layout(problem, kernel, tiles).values())


def workspace(problem: Problem, kernel: Kernel, tiles: Tiles) -> int:
    """Elements in which splits leave their m, l and O, and what they watch."""
    if tiles.splits == 1:
        return 0
    heads = round_up(tiles.heads, kernel.tile.keys) * tiles.groups if kernel.together else tiles.heads
    return tiles.tasks * tiles.rows * heads * (paddings(problem, kernel, tiles)["DVP"] + (4 if kernel.stats else 2))


def stash(problem: Problem, kernel: Kernel, tiles: Tiles) -> int:
    """Elements in which a thread of the double backward keeps S, dP and their derivatives of its rows and all keys; 0 where they
    would take more than STASH, and are computed twice."""
    if kernel.kind != "double_backward":
        return 0
    blocks = -(-problem.seqlen_k // tiles.keys)
    size = STASHED * blocks * tiles.keys * paddings(problem, kernel, tiles)["PS"]
    return size if size * _size(kernel) <= STASH else 0


def stash_rows(problem: Problem, kernel: Kernel, rows: int, keys: int) -> int:
    """As many of these rows, in whole strips, as have room in a stash; all of them where that would be too few."""
    R = kernel.tile.rows
    for fewer in range(rows, min(rows, STASH_ROWS) - 1, -R):
        if stash(problem, kernel, Tiles(fewer, keys, 1, 1, 1, 1)):
            return fewer
    return rows


def fits(problem: Problem, kernel: Kernel, tiles: Tiles) -> bool:
    left = ROOM - frame(problem, kernel, tiles)
    return left >= 0 and workspace(problem, kernel, tiles) * _size(kernel) <= SHARED + tiles.threads * left


def fitting(
    problem: Problem,
    kernel: Kernel,
    arrange: Callable[[int, int, int], Tiles],
    wanted: tuple[int, int, int],
    most: int,
) -> Tiles:
    """`arrange(heads, rows, keys)` as wanted, if there is room for it; else the cheapest blocks there is room for.

    `most` is the number of rows a head can use.
    """
    tiles = arrange(*wanted)
    if fits(problem, kernel, tiles):
        return tiles
    heads, rows, keys = wanted
    R, J = grain(kernel)
    parts = [(part, n) for part in range(1, heads + 1) if heads % part == 0 for n in range(R, most + 1, R)]
    parts = [(part, n) for part, n in parts if part * n <= heads * rows]
    parts.sort(key=lambda shape: (shape[0] * shape[1], shape[0]), reverse=True)
    largest: list[Tiles] = []
    for n in _halves(keys, J):
        shapes = (arrange(part, rows, n) for part, rows in parts)
        largest += islice((tiles for tiles in shapes if fits(problem, kernel, tiles)), 1)
    assert largest, "one strip of one head always fits"
    row_cost, key_cost = COSTS[bool(kernel.matrix)]
    return min(largest, key=lambda tiles: row_cost / (tiles.heads * tiles.rows) + key_cost / tiles.keys)


def _halves(keys: int, multiple: int) -> list[int]:
    """`keys`, half of them, a quarter, … in whole register tiles."""
    counts = [keys]
    while counts[-1] > max(LEAST_KEYS, multiple):
        counts.append(max(LEAST_KEYS, round_up(counts[-1] // 2, multiple)))
    return counts


def _size(kernel: Kernel) -> int:
    return 8 if kernel.real == "float64" else 4
