"""From a Problem to a kernel, its tiles and the fixed words of its arguments."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

from tilewise.backends.cpu.spec import Kernel, Register
from tilewise.hardware.probe import probe_cpu
from tilewise.planner.cpu import cpu_tile
from tilewise.problem import Problem

LOG2E = 1.4426950408889634
UNROLL = 4  # of the kernels' contractions: head dims are padded to it
FRAME_BYTES = 512
ALIGN = 16  # elements
SMALL_WORK = 2.0e6  # multiply-adds below which waking a second thread costs more than it brings


def bits(x: float) -> int:
    """A double as the signed 64-bit word that carries it."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pitch(columns: int) -> int:
    """Row stride of a packed tile: a power of two would make its rows collide in L1."""
    return columns + ALIGN if columns % 32 == 0 else columns


@dataclass(frozen=True)
class Tiles:
    """Blocks of one call. `rows` and `keys` of a block; `blocks` of queries in the longest sequence; `splits` of the keys."""

    rows: int
    keys: int
    blocks: int
    splits: int
    tasks: int
    threads: int


@dataclass(frozen=True)
class Padded:
    """Head dims as the kernel holds them."""

    dp: int
    dvp: int
    ldk: int
    ldv: int


def kernel_for(problem: Problem, kind: str, bias_dtype: str = "") -> Kernel:
    return Kernel(
        kind=kind,
        dtype=problem.dtype,
        tile=register_tile(problem),
        structure=problem.program.structure,
        softcap=problem.softcap > 0,
        bias=bias_dtype,
        alibi=problem.alibi,
        dropout=problem.dropout_p > 0,
        varlen=problem.varlen,
    )


def register_tile(problem: Problem) -> Register:
    tile = cpu_tile(probe_cpu(), problem)
    return Register(tile.lanes, tile.row_vectors, tile.key_unroll)


def pad(problem: Problem, tile: Register) -> Padded:
    dp, dvp = round_up(problem.head_dim, UNROLL), round_up(problem.head_dim_v, tile.keys)
    return Padded(dp, dvp, pitch(dp), pitch(dvp))


def tiles_for(problem: Problem, tile: Register, longest: int, threads: int) -> Tiles:
    """Blocks large enough to pay for packing K and V, small enough that every thread has work."""
    spec = probe_cpu()
    choice = cpu_tile(spec, replace(problem, seqlen_q=max(longest, 1)))
    keys = round_up(choice.block_k, tile.keys)
    R, group = tile.rows, max(1, problem.group)
    heads = max(1, problem.batch * problem.kv_heads)
    rows = max(R, round_up(min(choice.block_q, longest), R))
    while rows > R and group * rows > 512:
        rows = round_up(rows // 2, R)
    while rows > R and heads * -(-longest // rows) < 4 * threads and threads > 1:
        rows = round_up(rows // 2, R)
    blocks = -(-longest // rows)
    tasks = heads * blocks
    splits = 1
    if 0 < tasks < 2 * threads and threads > 1:
        splits = max(1, min(2 * threads // tasks, problem.seqlen_k // (2 * keys)))
    work = 1.0 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    threads = 1 if work < SMALL_WORK else min(threads, tasks * splits)
    return Tiles(rows, keys, blocks, splits if threads > 1 else 1, tasks * (splits if threads > 1 else 1), threads)


def frame_bytes(kernel: Kernel, tiles: Tiles, padded: Padded, group: int) -> int:
    """Size of a thread's buffer; the kernel lays it out in the same order."""
    R, rows = kernel.tile.rows, tiles.rows * group
    sizes = [rows * padded.dp, rows * padded.dvp, rows, rows, tiles.keys * R, tiles.keys * R, R, R]
    sizes += [tiles.keys * padded.ldk, tiles.keys * padded.ldv]
    return FRAME_BYTES + sum(round_up(n, ALIGN) for n in sizes) * (8 if kernel.real == "float64" else 4)


def numbers(problem: Problem, plain: bool) -> tuple[int, int, int, int]:
    """q_factor, log2_factor, cap_factor, keep_factor as words.

    A plain kernel leaves Q as it is and scales in the exponent, one rounding less; the factor there must be positive.
    """
    keep = 1.0 / (1.0 - problem.dropout_p)
    scale = problem.scale * LOG2E
    if plain:
        sign = 0.0 if scale == 0 else math.copysign(1.0, scale)
        return bits(sign), bits(abs(scale) if sign else 1.0), bits(0.0), bits(keep)
    if problem.softcap:
        return bits(problem.scale / problem.softcap), bits(1.0), bits(problem.softcap * LOG2E), bits(keep)
    return bits(1.0), bits(1.0), bits(scale), bits(keep)
