"""The memory of a call beyond its results, and blocks small enough for it.

A call may take ROOM for each thread and SHARED for all of them together. A thread's buffer holds, of one block, Q and O (or Q, dO
and dQ) and the packed K and V; where the keys are split, each share leaves its state in a workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tilewise.backends.cpu.spec import ACCUMULATORS, ALIGN, FRAME_BYTES, Kernel
from tilewise.problem import Problem

ROOM = 1 << 20
SHARED = 3 << 20
"""Bytes. A fourth mebibyte for all is left to arguments, statistics and what the system adds."""
COSTS = {False: (10.0, 1.0), True: (35.0, 10.0)}
"""What a block of rows and a block of keys cost beside their products (packing, and sums read and written once for each), in
rows and keys; on vectors, and on matrix tiles, where products take less time. Neoverse N1, fp32, head dims 256 and 512, forward
and backward: 9 to 11 and 0.5 to 1.2. Xeon with AMX, bf16: from 64, 128 and 256 keys, and from 256 × 64 and 512 × 128."""
LEAST_KEYS = DECODE_KEYS = 16


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


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


def grain(kernel: Kernel) -> tuple[int, int]:
    """Blocks have so many rows and keys, or multiples. Decoding works out several keys' scores at once, and weighs a vector of
    them: two vectors, where they are short."""
    tile = kernel.tile
    least = max(ACCUMULATORS // tile.keys, min(2 * tile.lanes, DECODE_KEYS))
    return (1, least) if kernel.kind == "decode" else (tile.rows, tile.keys)


def paddings(problem: Problem, kernel: Kernel, tiles: Tiles) -> dict[str, int]:
    """Head dims as register tiles take them, and the distance of two rows of P."""
    J, R = kernel.tile.keys, kernel.tile.rows
    d, dv = problem.head_dim, problem.head_dim_v
    # rows of P and dS lie a cache line more apart than they are long: a power of two would put a column into few sets of L1
    apart = tiles.rows + (2 * ALIGN if kernel.matrix else ALIGN)
    return {"DP": round_up(d, J), "DVP": round_up(dv, J), "DR": round_up(d, R), "DVR": round_up(dv, R), "PS": apart}


def frame(problem: Problem, kernel: Kernel, tiles: Tiles) -> int:
    """Bytes of a thread's buffer."""
    kinds = _MATRIX if kernel.matrix else _VECTORS
    cells = kinds[kernel.kind](problem, kernel, tiles, paddings(problem, kernel, tiles))
    return FRAME_BYTES + sum(round_up(n, ALIGN) for n in cells) * _size(kernel)


def workspace(problem: Problem, kernel: Kernel, tiles: Tiles) -> int:
    """Elements in which shares of the keys leave their m, l and O."""
    if tiles.splits == 1:
        return 0
    return tiles.tasks * tiles.rows * tiles.heads * (paddings(problem, kernel, tiles)["DVP"] + 2)


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
    found: list[Tiles] = []
    for n in _halves(keys, J):
        shapes = (arrange(part, rows, n) for part, rows in parts)
        found += _first(tiles for tiles in shapes if fits(problem, kernel, tiles))
    assert found, "one strip of one head always fits"
    row_cost, key_cost = COSTS[bool(kernel.matrix)]
    return min(found, key=lambda tiles: row_cost / (tiles.heads * tiles.rows) + key_cost / tiles.keys)


def _halves(keys: int, multiple: int) -> list[int]:
    """`keys`, half of them, a quarter, … in whole register tiles."""
    found = [keys]
    while keys > max(LEAST_KEYS, multiple):
        keys = max(LEAST_KEYS, round_up(keys // 2, multiple))
        found.append(keys)
    return found


def _first(shapes: Iterable[Tiles]) -> list[Tiles]:
    for tiles in shapes:
        return [tiles]
    return []


# -- buffers as kernels lay them out, in elements of their Real type

Buffers = Callable[[Problem, Kernel, Tiles, dict[str, int]], list[int]]


def _forward(problem: Problem, kernel: Kernel, tiles: Tiles, pad: dict[str, int]) -> list[int]:
    R, rows, keys = kernel.tile.rows, tiles.rows * tiles.heads, tiles.keys
    sizes = [rows * pad["DP"], rows * pad["DVP"], rows, rows, keys * R, keys * R, R, R, tiles.rows]
    return [*sizes, keys * pad["DP"], keys * pad["DVP"], rows, 1, R]


def _decode(problem: Problem, kernel: Kernel, tiles: Tiles, pad: dict[str, int]) -> list[int]:
    rows, d, dv = round_up(tiles.heads, kernel.tile.keys), problem.head_dim, problem.head_dim_v
    return [rows * d, rows * dv, rows, rows, max(rows * tiles.keys, dv + ALIGN)]


def _backward(problem: Problem, kernel: Kernel, tiles: Tiles, pad: dict[str, int]) -> list[int]:
    R, rows, keys = kernel.tile.rows, tiles.rows, tiles.keys
    sizes = [rows * pad[n] for n in ("DP", "DVP", "DR", "DVR", "DP")]
    sizes += [keys * pad["PS"], keys * pad["PS"], keys * R, keys * R, rows, rows, rows, rows, kernel.tile.keys * R]
    return [*sizes, *(keys * pad[n] for n in ("DP", "DVP", "DP")), 2 * rows, 2 * rows]


def _matrix_forward(problem: Problem, kernel: Kernel, tiles: Tiles, pad: dict[str, int]) -> list[int]:
    R, rows, keys = kernel.tile.rows, tiles.rows * tiles.heads, tiles.keys
    halves = [rows * pad["DP"], keys * pad["DP"], keys * pad["DVP"], keys * R]
    return [*(n // 2 for n in halves), rows * pad["DVP"], rows, rows, keys * R, keys * R, R, R, tiles.rows, R]


def _matrix_backward(problem: Problem, kernel: Kernel, tiles: Tiles, pad: dict[str, int]) -> list[int]:
    R, rows, keys = kernel.tile.rows, tiles.rows, tiles.keys
    halves = [rows * pad[n] for n in ("DP", "DVP", "DR", "DVR")] + [keys * pad["PS"]] * 2
    halves += [keys * pad[n] for n in ("DP", "DVP", "DP")] + [keys * R]
    sizes = [rows * pad["DP"], *[keys * R] * 4, rows, rows, rows, rows, kernel.tile.keys * R, 2 * rows, 2 * rows]
    return [*(n // 2 for n in halves), *sizes]


_VECTORS: dict[str, Buffers] = {"forward": _forward, "decode": _decode, "backward": _backward}
_MATRIX: dict[str, Buffers] = {"forward": _matrix_forward, "backward": _matrix_backward}


def _size(kernel: Kernel) -> int:
    return 8 if kernel.real == "float64" else 4
