"""The arguments of a kernel that stay the same from call to call."""

from __future__ import annotations

import struct

from tilewise.backends.cpu.blocks import SPAN
from tilewise.backends.cpu.frames import Tiles, paddings
from tilewise.backends.cpu.spec import Kernel
from tilewise.masks.program import UNBOUNDED
from tilewise.problem import Problem

LOG2E = 1.4426950408889634


def bits(x: float) -> int:
    """A double as the signed 64-bit argument that carries it."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def fixed_arguments(problem: Problem, kernel: Kernel, tiles: Tiles) -> dict[str, int]:
    """By name."""
    # a part of a group is a group of its own to the kernel, but for the key head that it shares with others
    heads = problem.group if kernel.backwards else tiles.heads
    arguments = {
        "groups": problem.heads // heads,
        "group": heads,
        "together": tiles.groups,
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
        "top": problem.top,
        "page": problem.page,
        "span": SPAN,
    }
    # an open side lies far beyond every offset that may be added to it
    limits = (value if abs(value) < UNBOUNDED else value << 20 for value in problem.program.ints)
    return arguments | paddings(problem, kernel, tiles) | {f"mask_i{n}": limit for n, limit in enumerate(limits)}


def _grows(problem: Problem) -> bool:
    """Do later rows see more keys? Then they are started first."""
    kinds, ints = problem.program.kinds, problem.program.ints
    if kinds and kinds[0].is_rows:
        return bool(ints[0])
    return bool(kinds) and kinds[0].is_bottom_right and ints[0] <= -UNBOUNDED
