"""From a Problem to a kernel, its tiles and the arguments that stay the same from call to call."""

from __future__ import annotations

import struct
from collections.abc import Callable

from tilewise.backends.cpu.frames import Tiles, fits, fitting, grain, paddings
from tilewise.backends.cpu.spec import Kernel, Register, round_up
from tilewise.hardware import amx
from tilewise.hardware.probe import probe_cpu
from tilewise.masks.program import UNBOUNDED, is_interval
from tilewise.model.cpu import cpu_tile, register_tile, short_tile
from tilewise.problem import Problem

LOG2E = 1.4426950408889634
SMALL_WORK = 3.0e6
"""Multiply-adds below which waking a second thread costs more than it brings."""
TASK_ROWS = ((2 << 20, 768), (1 << 20, 512), (0, 256))
"""(bytes of L2, rows): rows of all heads of a group in one task, in whole strips, where L2 has at least so many bytes. K and V
are packed once for all of them; Q and O should fit beside K and V. (Xeon, 2 MiB, head dim 128, 4096 keys: 768 rows 5 % faster
than 528. The last entry was not measured.)"""
FEW_TASK_ROWS = 512
MANY_TASKS = 12
"""More rows than that only where every thread has so many tasks all the same: threads should end together."""

MATRIX_KINDS = ("forward", "backward")
"""Kernels that are made for matrix tiles too."""
MATRIX_KEYS = {"forward": 256, "backward": 128}
"""Keys of a block there: products are so short that what is done once a block counts."""
MATRIX_TALL = 512
"""Rows of a block in the backward, if that many fit into a thread's buffer."""
STREAM_KEYS = 256
"""Keys whose sums are complete before they join those of the others, when one row is decoded."""
BACKWARD_TALL = 256
BACKWARD_TASKS = 32
"""Rows of a block in the backward, if there are at least so many of them for the threads to share; else half."""


def bits(x: float) -> int:
    """A double as the signed 64-bit argument that carries it."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def register_for(problem: Problem, kind: str = "forward", longest: int = 0) -> Register:
    """The register tile of this machine for the problem's arithmetic and so many query rows; 0: many."""
    spec = probe_cpu()
    size = 8 if problem.arithmetic == "float64" else 4
    if spec.arch == "aarch64" and spec.isa != "neon":  # SVE machines run NEON's instructions too; kernels use those
        return Register(16 // size, 4, 4)
    # the backward lays strips along the head dim as well, and a power of two divides that
    dim = max(problem.head_dim, problem.head_dim_v) if kind == "forward" else 0
    micro, _ = register_tile(spec, size, dim)
    if kind == "forward" and longest:
        micro = short_tile(spec, size, micro, longest)
    return Register(spec.lanes(size), micro.row_vectors, micro.keys)


def decode_register(problem: Problem) -> Register | None:
    """The tile of the decode kernel: lanes and vectors along the head dim, `keys` query rows. None if the dims do not fit."""
    lanes = register_for(problem).lanes
    while problem.head_dim % lanes or problem.head_dim_v % lanes:
        lanes //= 2
    if lanes < min(4, 16 // (8 if problem.arithmetic == "float64" else 4)):
        return None
    rows = 4 if problem.group > 2 else problem.group
    return Register(lanes, 4 if rows == 4 else 8, rows)


def decodes(problem: Problem) -> bool:
    """Can the decode kernel serve a call of one query: keys in an interval, nothing done to the scores, dims that fit?"""
    return (
        not (problem.softcap or problem.alibi or problem.dropout_p or problem.bias)
        and is_interval(problem.program.structure)
        and decode_register(problem) is not None
    )


def matrix_unit(problem: Problem, kind: str) -> str:
    """The unit whose tiles a kernel multiplies with; "" for vectors."""
    suits = problem.dtype == "bfloat16" and problem.arithmetic == "float32"
    return "amx" if kind in MATRIX_KINDS and suits and amx.obstacle() is None else ""


def kernel_for(problem: Problem, kind: str, bias_dtype: str = "", dbias: bool = False, longest: int = 0) -> Kernel:
    """The kernel of a call; `longest` is the number of queries of its longest sequence, if that is not the problem's."""
    matrix = matrix_unit(problem, kind)
    tile: Register | None
    if matrix:  # two by two tiles: 32 rows, 32 keys
        lanes = register_for(problem).lanes
        tile = Register(lanes, 32 // lanes, 32)
    else:
        tile = decode_register(problem) if kind == "decode" else register_for(problem, kind, longest or problem.seqlen_q)
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
        double=problem.widened,
    )


def tiles_for(problem: Problem, kernel: Kernel, longest: int, threads: int) -> Tiles:
    """The blocks of a call whose longest sequence has so many queries."""
    scores = 1.0 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
    if scores * (problem.head_dim + problem.head_dim_v) < SMALL_WORK:
        threads = 1
    if kernel.kind == "decode":
        return _decode_tiles(problem, kernel, threads)
    if kernel.kind == "forward":
        return _forward_tiles(problem, kernel, longest, threads)
    return (_matrix_backward_tiles if kernel.matrix else _backward_tiles)(problem, kernel, longest, threads)


def _forward_tiles(problem: Problem, kernel: Kernel, longest: int, threads: int) -> Tiles:
    """Blocks large enough to pay for packing K and V, small enough that every thread has work."""
    R, J = kernel.tile.rows, kernel.tile.keys
    usual = round_up(cpu_tile(probe_cpu(), problem).block_k, J)
    keys = round_up(min(MATRIX_KEYS["forward"], problem.seqlen_k), J) if kernel.matrix else usual
    together = next(rows for size, rows in TASK_ROWS if probe_cpu().l2_bytes >= size)
    if problem.batch * problem.heads * longest < MANY_TASKS * threads * together:
        together = min(together, FEW_TASK_ROWS)
    most = max(R, round_up(min(together, longest), R))
    blocks = -(-longest // max(R, (together + R - 1) // problem.group // R * R))
    rows = max(R, round_up(-(-longest // max(1, blocks)), R))  # of one length, or nearly

    def arrange(heads: int, rows: int, keys: int) -> Tiles:
        pairs = problem.batch * problem.heads // heads
        while rows > R and threads > 1 and pairs * -(-longest // rows) < 4 * threads:
            rows = round_up(rows // 2, R)
        blocks = -(-longest // rows)
        splits = _splits(problem, threads, pairs * blocks, each=2, least_keys=2 * min(keys, usual))
        return _tiles(problem, (heads, rows, keys), blocks, splits, threads)

    return fitting(problem, kernel, arrange, (problem.group, rows, keys), most)


def _decode_tiles(problem: Problem, kernel: Kernel, threads: int) -> Tiles:
    """Key blocks that fill half of L1, for the next one is on its way; less where few rows use them and memory is waited for; but
    not too few. A single row only sums by blocks."""
    pair, (_, step) = (problem.head_dim + problem.head_dim_v) * problem.itemsize, grain(kernel)
    room = probe_cpu().l1d_bytes * (3 if problem.group <= problem.itemsize else 4) // 8
    keys = max(step, room // pair // step * step) if kernel.tile.keys > 1 else STREAM_KEYS

    def arrange(heads: int, rows: int, keys: int) -> Tiles:
        splits = _splits(problem, threads, problem.batch * problem.heads // heads, each=4, least_keys=4 * keys)
        return _tiles(problem, (heads, rows, keys), 1, splits, threads)

    return fitting(problem, kernel, arrange, (problem.group, 1, keys), 1)


def _backward_tiles(problem: Problem, kernel: Kernel, longest: int, threads: int) -> Tiles:
    R = kernel.tile.rows
    keys = round_up(min(cpu_tile(probe_cpu(), problem).block_k, 64), kernel.tile.keys)
    # tall blocks pay for packing K and V; the choice must not depend on the threads, or the order of sums would
    tall = problem.batch * problem.heads * (longest // BACKWARD_TALL) >= BACKWARD_TASKS
    rows = max(R, round_up(min(BACKWARD_TALL if tall else BACKWARD_TALL // 2, longest), R))
    return fitting(problem, kernel, _by_heads(problem, longest, threads), (1, rows, keys), rows)


def _matrix_backward_tiles(problem: Problem, kernel: Kernel, longest: int, threads: int) -> Tiles:
    """Every block of rows packs all of K and V and adds to all of dK and dV: it is as tall as memory and the number of tasks
    allow. Here too the choice must not depend on the threads."""
    R = kernel.tile.rows
    keys = round_up(min(MATRIX_KEYS["backward"], problem.seqlen_k), kernel.tile.keys)
    arrange = _by_heads(problem, longest, threads)
    rows = min(MATRIX_TALL, round_up(longest, R))
    while rows > R and not fits(problem, kernel, arrange(1, rows, keys)):
        rows -= R
    while rows > BACKWARD_TALL // 2 and problem.batch * problem.heads * (longest // rows) < BACKWARD_TASKS:
        rows = round_up(rows // 2, R)
    return fitting(problem, kernel, arrange, (1, rows, keys), rows)


def _by_heads(problem: Problem, longest: int, threads: int) -> Callable[[int, int, int], Tiles]:
    """In the backward a task has one query head."""
    return lambda heads, rows, keys: _tiles(problem, (heads, rows, keys), -(-longest // rows), 1, threads)


def _splits(problem: Problem, threads: int, tasks: int, *, each: int, least_keys: int) -> int:
    """Parts of the keys, so that every one of several threads has `each` tasks, of at least so many keys."""
    return max(1, min(-(-each * threads // tasks), problem.seqlen_k // least_keys)) if threads > 1 else 1


def _tiles(problem: Problem, shape: tuple[int, int, int], blocks: int, splits: int, threads: int) -> Tiles:
    heads, rows, keys = shape
    tasks = problem.batch * problem.heads // heads * blocks * splits
    return Tiles(rows, keys, blocks, splits, tasks, min(threads, tasks), heads)


def fixed_arguments(problem: Problem, kernel: Kernel, tiles: Tiles) -> dict[str, int]:
    """The arguments that stay the same from call to call, by name."""
    # a part of a group is a group of its own to the kernel, but for the key head that it shares with others
    heads = tiles.heads if kernel.kind != "backward" else problem.group
    arguments = {
        "groups": problem.heads // heads,
        "group": heads,
        "parts": problem.group // heads,
        "pairs": problem.batch * problem.heads // heads,
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
        # scores come out of the product in the kernel's unit, or ready for tanh
        "q_factor": bits(problem.scale / problem.softcap if problem.softcap else problem.scale * LOG2E / kernel.score_unit),
        "cap_factor": bits(problem.softcap * LOG2E / kernel.score_unit),
        "keep_factor": bits(1.0 - problem.dropout_p),
        "grow_factor": bits(1.0 / (1.0 - problem.dropout_p)),
        "threshold": int(problem.dropout_p * 2**32),
        "ds_factor": bits(problem.scale),
    }
    # an open side lies far beyond every offset that may be added to it
    limits = (value if abs(value) < UNBOUNDED else value << 20 for value in problem.program.ints)
    return arguments | paddings(problem, kernel, tiles) | {f"mask_i{n}": limit for n, limit in enumerate(limits)}


def _grows(problem: Problem) -> bool:
    """Do later rows see more keys? Then they are started first."""
    kinds, ints = problem.program.kinds, problem.program.ints
    return bool(kinds) and kinds[0].is_bottom_right and ints[0] <= -UNBOUNDED
