"""From a Problem to a kernel, its tiles and the fixed words of its arguments."""

from __future__ import annotations

import struct
from typing import NamedTuple

from tilewise.backends.cpu.spec import ALIGN, FRAME_BYTES, Kernel, Register
from tilewise.hardware import amx
from tilewise.hardware.probe import probe_cpu
from tilewise.masks.program import UNBOUNDED
from tilewise.planner.cpu import cpu_tile, register_tile
from tilewise.problem import Problem

LOG2E = 1.4426950408889634
SMALL_WORK = 3.0e6
"""Multiply-adds below which waking a second thread costs more than it brings."""
GROUP_ROWS = 512
"""Rows of all heads of a group in one task: beyond it Q and O no longer fit beside K and V in L2."""


MATRIX_KINDS = ("forward", "backward")
"""Kernels that are made for matrix tiles too."""
MATRIX_KEYS = {"forward": 256, "backward": 128}
"""Keys of a block there: products are so short that what is done once a block counts."""
MATRIX_TALL = 512
MATRIX_ROOM = 1 << 20
"""Rows of a block in the backward, if that many fit into a thread's mebibyte."""
STREAM_KEYS = 256
"""Keys whose sums are complete before they join those of the others, when one row is decoded."""
BACKWARD_TALL = 256
BACKWARD_TASKS = 32
"""Rows of a block in the backward, if there are at least so many of them for the threads to share; else half."""


def bits(x: float) -> int:
    """A double as the signed 64-bit word that carries it."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Tiles(NamedTuple):
    """Blocks of one call: query rows of a task (per head), keys of a block, query blocks of the longest sequence."""

    rows: int
    keys: int
    blocks: int
    splits: int
    tasks: int
    threads: int


def register_for(problem: Problem, kind: str = "forward") -> Register:
    """The register tile of this machine for the problem's arithmetic."""
    spec = probe_cpu()
    size = 8 if problem.dtype == "float64" else 4
    if spec.arch == "aarch64" and spec.isa != "neon":  # SVE machines run NEON's instructions too; kernels use those
        return Register(16 // size, 4, 4)
    # the backward lays strips along the head dim as well, and a power of two divides that
    dim = max(problem.head_dim, problem.head_dim_v) if kind == "forward" else 0
    micro, _ = register_tile(spec, size, dim)
    return Register(spec.lanes(size), micro.row_vectors, micro.keys)


def decode_register(problem: Problem) -> Register | None:
    """The tile of the decode kernel: lanes and vectors along the head dim, `keys` query rows. None if the dims do not fit."""
    lanes = register_for(problem).lanes
    while problem.head_dim % lanes or problem.head_dim_v % lanes:
        lanes //= 2
    if lanes < min(4, 16 // (8 if problem.dtype == "float64" else 4)):
        return None
    rows = 4 if problem.group > 2 else problem.group
    return Register(lanes, 4 if rows == 4 else 8, rows)


def matrix_unit(problem: Problem, kind: str) -> str:
    """The unit whose tiles a kernel multiplies with; "" for vectors."""
    return "amx" if kind in MATRIX_KINDS and problem.dtype == "bfloat16" and amx.obstacle() is None else ""


def matrix_register(problem: Problem) -> Register:
    """Two by two tiles: 32 rows, 32 keys."""
    lanes = register_for(problem).lanes
    return Register(lanes, 32 // lanes, 32)


def kernel_for(problem: Problem, kind: str, bias_dtype: str = "", dbias: bool = False) -> Kernel:
    matrix = matrix_unit(problem, kind)
    tile = decode_register(problem) if kind == "decode" else register_for(problem, kind)
    tile = matrix_register(problem) if matrix else tile
    assert tile is not None
    return Kernel(
        kind=kind,
        dtype=problem.dtype,
        tile=tile,
        structure=problem.program.structure,
        softcap=problem.softcap > 0,
        bias=bias_dtype,
        alibi=problem.alibi,
        dropout=problem.dropout_p > 0,
        varlen=problem.varlen,
        dbias=dbias,
        matrix=matrix,
    )


def work_of(problem: Problem) -> float:
    """Multiply-adds of the forward, unmasked."""
    return 1.0 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)


def forward_tiles(problem: Problem, tile: Register, longest: int, threads: int) -> Tiles:
    """Blocks large enough to pay for packing K and V, small enough that every thread has work."""
    choice = cpu_tile(probe_cpu(), problem)
    R, group = tile.rows, max(1, problem.group)
    keys = round_up(choice.block_k, tile.keys)
    pairs = problem.batch * problem.kv_heads
    if work_of(problem) < SMALL_WORK:
        threads = 1
    rows = max(R, round_up(min(GROUP_ROWS, longest), R))
    while rows > R and group * rows > GROUP_ROWS:
        rows = round_up(rows // 2, R)
    while rows > R and threads > 1 and pairs * -(-longest // rows) < 4 * threads:
        rows = round_up(rows // 2, R)
    blocks = -(-longest // rows)
    splits = 1
    if threads > 1 and pairs * blocks < 2 * threads:
        splits = max(1, min(-(-2 * threads // (pairs * blocks)), problem.seqlen_k // (2 * keys)))
    tasks = pairs * blocks * splits
    return Tiles(rows, keys, blocks, splits, tasks, min(threads, tasks))


def decode_tiles(problem: Problem, tile: Register, longest: int, threads: int) -> Tiles:
    """Key blocks of which two fit into L1, one in use and one on its way; a single row only sums by blocks."""
    pair = (problem.head_dim + problem.head_dim_v) * problem.itemsize
    keys = max(2 * tile.lanes, 32, probe_cpu().l1d_bytes // (2 * pair) // 32 * 32) if tile.keys > 1 else STREAM_KEYS
    pairs = problem.batch * problem.kv_heads
    if work_of(problem) < SMALL_WORK:
        threads = 1
    splits = 1
    if threads > 1 and pairs < 4 * threads:
        splits = max(1, min(-(-4 * threads // pairs), problem.seqlen_k // (4 * keys)))
    return Tiles(1, keys, 1, splits, pairs * splits, min(threads, pairs * splits))


def backward_tiles(problem: Problem, tile: Register, longest: int, threads: int) -> Tiles:
    choice = cpu_tile(probe_cpu(), problem)
    R = tile.rows
    keys = round_up(min(choice.block_k, 64), tile.keys)
    # tall blocks pay for packing K and V; the choice must not depend on the threads, or the order of sums would
    tall = problem.batch * problem.heads * (longest // BACKWARD_TALL) >= BACKWARD_TASKS
    rows = max(R, round_up(min(BACKWARD_TALL if tall else BACKWARD_TALL // 2, longest), R))
    if work_of(problem) < SMALL_WORK:
        threads = 1
    blocks = -(-longest // rows)
    tasks = problem.batch * problem.heads * blocks
    return Tiles(rows, keys, blocks, 1, tasks, min(threads, tasks))


def matrix_forward_tiles(problem: Problem, tile: Register, longest: int, threads: int) -> Tiles:
    tiles = forward_tiles(problem, tile, longest, threads)
    return tiles._replace(keys=round_up(min(MATRIX_KEYS["forward"], problem.seqlen_k), tile.keys))


def matrix_backward_tiles(problem: Problem, tile: Register, longest: int, threads: int) -> Tiles:
    """Every block of rows packs all of K and V and adds to all of dK and dV: it is as tall as memory and the number of tasks
    allow. Here too the choice must not depend on the threads."""
    R = tile.rows
    keys = round_up(min(MATRIX_KEYS["backward"], problem.seqlen_k), tile.keys)
    d, dv = (round_up(n, tile.keys) for n in (problem.head_dim, problem.head_dim_v))
    row = 4 * (d + dv) + 4 * d + 4 * keys + 32  # bytes: Q and dO in two layouts, dQ, P and dS, numbers
    rest = keys * (2 * (2 * d + dv) + 20 * R) + FRAME_BYTES + 4096
    rows = min(MATRIX_TALL, max(R, (MATRIX_ROOM - rest) // row // R * R), round_up(longest, R))
    while rows > BACKWARD_TALL // 2 and problem.batch * problem.heads * (longest // rows) < BACKWARD_TASKS:
        rows = round_up(rows // 2, R)
    if work_of(problem) < SMALL_WORK:
        threads = 1
    blocks = -(-longest // rows)
    tasks = problem.batch * problem.heads * blocks
    return Tiles(rows, keys, blocks, 1, tasks, min(threads, tasks))


def forward_frame(kernel: Kernel, tiles: Tiles, words: dict[str, int]) -> int:
    """Bytes of a thread's buffer; the kernel lays it out in the same order."""
    R, rows, keys = kernel.tile.rows, tiles.rows * words["group"], tiles.keys
    sizes = [rows * words["DP"], rows * words["DVP"], rows, rows, keys * R, keys * R, R, R, tiles.rows]
    sizes += [rows, 1, R]
    return _bytes(kernel, [*sizes, keys * words["DP"], keys * words["DVP"]])


def decode_frame(kernel: Kernel, tiles: Tiles, words: dict[str, int]) -> int:
    rows = round_up(words["group"], kernel.tile.keys)
    scratch = max(rows * tiles.keys, words["Dv"] + ALIGN)
    return _bytes(kernel, [rows * words["D"], rows * words["Dv"], rows, rows, scratch])


def backward_frame(kernel: Kernel, tiles: Tiles, words: dict[str, int]) -> int:
    R, rows, keys = kernel.tile.rows, tiles.rows, tiles.keys
    sizes = [rows * words[n] for n in ("DP", "DVP", "DR", "DVR", "DP")]
    sizes += [keys * words["PS"], keys * words["PS"], keys * R, keys * R, rows, rows, rows, rows, kernel.tile.keys * R]
    return _bytes(kernel, [*sizes, *(keys * words[n] for n in ("DP", "DVP", "DP")), 2 * rows, 2 * rows])


def matrix_forward_frame(kernel: Kernel, tiles: Tiles, words: dict[str, int]) -> int:
    R, rows, keys = kernel.tile.rows, tiles.rows * words["group"], tiles.keys
    halves = [rows * words["DP"], keys * words["DP"], keys * words["DVP"], keys * R]
    sizes = [rows * words["DVP"], rows, rows, keys * R, keys * R, R, R, tiles.rows, R]
    return _bytes(kernel, [*(n // 2 for n in halves), *sizes])


def matrix_backward_frame(kernel: Kernel, tiles: Tiles, words: dict[str, int]) -> int:
    R, rows, keys = kernel.tile.rows, tiles.rows, tiles.keys
    halves = [rows * words[n] for n in ("DP", "DVP", "DR", "DVR")] + [keys * words["PS"]] * 2
    halves += [keys * words[n] for n in ("DP", "DVP", "DP")] + [keys * R]
    sizes = [rows * words["DP"], *[keys * R] * 4, rows, rows, rows, rows, kernel.tile.keys * R, 2 * rows, 2 * rows]
    return _bytes(kernel, [*(n // 2 for n in halves), *sizes])


def _bytes(kernel: Kernel, sizes: list[int]) -> int:
    return FRAME_BYTES + sum(round_up(n, ALIGN) for n in sizes) * (8 if kernel.real == "float64" else 4)


def words_for(problem: Problem, kernel: Kernel, tiles: Tiles) -> dict[str, int]:
    """The fixed words of a call, by name."""
    J, R = kernel.tile.keys, kernel.tile.rows
    dp, dvp = round_up(problem.head_dim, J), round_up(problem.head_dim_v, J)
    words = {
        "kv_heads": problem.kv_heads,
        "group": problem.group,
        "pairs": problem.batch * problem.kv_heads,
        "Sq": problem.seqlen_q,
        "Sk": problem.seqlen_k,
        "D": problem.head_dim,
        "Dv": problem.head_dim_v,
        "BM": tiles.rows,
        "BN": tiles.keys,
        "blocks": tiles.blocks,
        "splits": tiles.splits,
        "tasks": tiles.tasks,
        "descending": int(_grows(problem)),
        "DP": dp,
        "DVP": dvp,
        # scores come out of the product in units of log 2, or ready for tanh
        "q_factor": bits(problem.scale / problem.softcap if problem.softcap else problem.scale * LOG2E),
        "cap_factor": bits(problem.softcap * LOG2E),
        "keep_factor": bits(1.0 - problem.dropout_p),
        "grow_factor": bits(1.0 / (1.0 - problem.dropout_p)),
        "threshold": int(problem.dropout_p * 2**32),
        "ds_factor": bits(problem.scale),
        "DR": round_up(problem.head_dim, R),
        "DVR": round_up(problem.head_dim_v, R),
        # rows of P and dS lie a cache line more apart than they are long: a power of two would put a column into few sets of L1
        "PS": tiles.rows + (2 * ALIGN if kernel.matrix else ALIGN),
    }
    words |= {f"mask_i{n}": value for n, value in enumerate(problem.program.ints)}
    return words


def _grows(problem: Problem) -> bool:
    """Do later rows see more keys? Then they are started first."""
    program = problem.program
    return program.structure.startswith("b") and program.ints[0] <= -UNBOUNDED
