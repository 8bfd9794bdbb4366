"""Launches: what is the same for every call of a problem, prepared once and kept.

They are kept with the problem, whose life ends with that of the cached call: one key (`launch_for`), and at most LAUNCHES of
them, for packed batches whose longest sequence varies. Problems whose mask holds tensors, and those with statistics, are new in
every call: their launches are kept by everything but the tensors.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.cpu import compile as compiler
from tilewise.backends.cpu import frames, plan, schedule
from tilewise.backends.cpu.directions import broadcast_strides
from tilewise.backends.cpu.fixed import fixed_arguments
from tilewise.backends.cpu.launch import REST_AT, CpuLaunch, num_threads
from tilewise.backends.cpu.lowering import is_static, mask_arguments
from tilewise.backends.cpu.spec import HOT, Kernel, argument_names
from tilewise.hardware.probe import probe_cpu
from tilewise.problem import Problem

LAUNCHES = 64
_launches: dict[Any, CpuLaunch] = {}
_fields = attrgetter(*(one.name for one in fields(Problem) if one.name not in ("mask", "memory")))
"""All of a problem but its mask."""


def adjacent(inputs: Inputs) -> bool:
    return bool(inputs.k.stride()[3] == inputs.v.stride()[3] == 1)


def launch_key(
    problem: Problem, inputs: Inputs, kind: str, dbias: bool
) -> tuple[str, int, torch.dtype | None, bool, int, bool]:
    """What a launch depends on beside the problem; packed batches are planned for their longest sequence."""
    longest, bias = problem.seqlen_q, inputs.bias
    if problem.rows:
        longest = problem.rows
    elif inputs.cu_q is not None:
        longest = max((b - a for a, b in pairwise(inputs.cu_q.tolist())), default=0)
    columns = longest != 1 or adjacent(inputs)
    return kind, num_threads(), None if bias is None else bias.dtype, dbias, longest, columns


def kernel_for(problem: Problem, inputs: Inputs, kind: str, dbias: bool = False) -> Kernel:
    """The kernel that a launch would compile."""
    _, threads, bias, _, longest, columns = launch_key(problem, inputs, kind, dbias)
    spec = probe_cpu(threads)
    tile = plan.tile_for(problem, spec, kind, longest, columns)
    return plan.kernel_for(problem, tile, spec, str(bias)[6:] if bias else "", dbias)


def launch_for(problem: Problem, inputs: Inputs, kind: str, dbias: bool = False) -> CpuLaunch:
    """The launch of a call, from the memory if there is one like it."""
    key = launch_key(problem, inputs, kind, dbias)
    kept = not problem.stats or problem.program.tensors  # calls with statistics are problems of their own, too
    if is_static(problem) and kept:
        launches: dict[Any, CpuLaunch] = problem.memory.setdefault("cpu launches", {})
        name: Any = key
    else:  # every call is a problem of its own, and most are like an earlier one but for what the mask's tensors hold
        launches, name = _launches, (key, _fields(problem), problem.program.structure, problem.program.ints)
    launch = launches.get(name)
    if launch is None:
        if len(launches) >= LAUNCHES:
            launches.clear()
        launch = launches[name] = _make_launch(problem, *key)
    return launch


def _make_launch(
    problem: Problem, kind: str, threads: int, bias: torch.dtype | None, dbias: bool, longest: int, columns: bool
) -> CpuLaunch:
    spec = probe_cpu(threads)
    tile = plan.tile_for(problem, spec, kind, longest, columns)
    kernel = plan.kernel_for(problem, tile, spec, str(bias)[6:] if bias else "", dbias)
    tiles = plan.grid_for(problem, tile, spec, longest)
    own_cells = problem.bias is not None and problem.bias[:3] == (problem.batch, problem.heads, problem.seqlen_q)
    if dbias and not own_cells:  # tasks would add to the same cells of dBias
        tiles = tiles._replace(threads=1)
    fixed = fixed_arguments(problem, kernel, tiles)
    held: list[Tensor] | None = None
    if is_static(problem):
        mask, held = mask_arguments(problem, kernel, tile.block_k, tile.block_q if tiles.threads > 1 else 0)
        fixed |= dict(mask)
    names = argument_names(kernel)
    values = [fixed.get(name, 0) for name in names[len(HOT) :]]
    entry = compiler.worker(kernel)
    if threads > 1 and compiler.awake():
        schedule.team()  # what else needs LLVM is compiled now, and not in a later call
    changed = kernel.bias or kernel.alibi or kernel.dropout or kernel.varlen or kernel.stats
    optional = changed or problem.sinks or held is None
    counters = tiles.tasks // tiles.splits if tiles.splits > 1 else 0
    real = torch.float64 if kernel.real == "float64" else torch.float32
    batch, heads, rows = 1 if problem.varlen else problem.batch, problem.heads, problem.seqlen_q
    return CpuLaunch(
        entry=entry,
        kernel=kernel,
        tile=tile,
        template=struct.pack(f"={len(values)}q", *values),
        end=REST_AT + 8 * len(values),
        offsets={name: 8 * n for n, name in enumerate(names)},
        size=frames.frame(problem, kernel, tiles),
        threads=tiles.threads,
        workspace=frames.workspace(problem, kernel, tiles) + frames.stash(problem, kernel, tiles) * tiles.threads,
        counters=problem.batch * problem.heads * tiles.blocks if kernel.backwards else counters,
        real=real,
        lse=((batch, heads, rows), (heads * rows, rows, 1), real),
        plain=not (optional or counters),
        held=held,
    )


def optional_arguments(problem: Problem, inputs: Inputs, launch: CpuLaunch) -> tuple[list[tuple[str, int]], list[Tensor]]:
    """The arguments of all tensors but q, k and v, and those of the tensors that must outlive the call."""
    args: list[tuple[str, int]] = []
    alive: list[Tensor] = []
    if inputs.bias is not None:
        strides = zip("bhsd", broadcast_strides(inputs.bias), strict=True)
        args += [("bias", inputs.bias.data_ptr()), *((f"bias_{axis}", stride) for axis, stride in strides)]
    if problem.dropout_p and inputs.seed is not None:
        args.append(("seed", int(inputs.seed)))
    wanted = {"alibi": launch.real, "sinks": launch.real, "cu_q": torch.int32, "cu_k": torch.int32}
    if launch.kernel.origins:
        wanted["origins"] = torch.int32
    for name, dtype in wanted.items():
        x: Tensor | None = getattr(inputs, name)
        if x is not None:
            alive.append(x.to(dtype).contiguous())
            args.append((name, alive[-1].data_ptr()))
    if inputs.alibi is not None:
        args.append(("alibi_b", inputs.alibi.shape[1] if inputs.alibi.shape[0] > 1 else 0))
    if launch.held is None:
        tile, shared = launch.tile, launch.threads > 1
        mask, memory = mask_arguments(problem, launch.kernel, tile.block_k, tile.block_q if shared else 0)
        return args + mask, alive + memory
    return args, alive
