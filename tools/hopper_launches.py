"""The Hopper kernels that a problem's plan launches, compiled for a GPU that need not be there, and held to the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tilewise.backends.hopper import arguments, plan
from tilewise.backends.hopper.backward import arguments as backward_arguments
from tilewise.backends.hopper.compile import compile_kernel
from tilewise.backends.hopper.jvp import arguments as jvp_arguments
from tilewise.backends.hopper.jvp.choose import Moving
from tilewise.backends.hopper.jvp.compile import compile_jvp
from tilewise.hardware import lookup
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

Kernel = tuple[str, Any, Any, TilePlan]
"""Its name, itself, what it is compiled for, and its tile."""


def planned_kernels(problem: Problem, gpu: Any, *, backward: bool) -> Iterator[Kernel]:
    """The kernels of the forward or the backward, one for each tile of the plan."""
    spec = lookup("h200")
    tiles = {tile.kernel: tile for tile in plan.tiles(problem, spec).values()}
    if not backward:
        def compiled(*what: Any) -> Any:
            return compile_kernel(gpu, "biased_kernel" if what[2].BIAS_STAGES else "forward_kernel", *what)

        made = arguments.make_plan(problem, spec, compiled)
        yield "forward_kernel", made.kernel, made.config, tiles["forward_kernel"]
        return
    for step in backward_arguments.make_plan(problem, spec, lambda name, *what: compile_kernel(gpu, name, *what)).steps:
        yield step.name, step.kernel, step.config, tiles[step.name]


def jvp_kernel(problem: Problem, gpu: Any, moving: str) -> Kernel:
    """The kernel of a JVP; `moving` names the inputs with a tangent. Where one has none, its tile is not the planned one."""
    spec = lookup("h200")
    moves = Moving(*(name in moving for name in "qkv"))
    made = jvp_arguments.make_plan(problem, spec, lambda *what: compile_jvp(gpu, *what), moves)
    planned = plan.described(problem, "jvp", made.config, "")
    return "jvp_kernel", made.kernel, made.config, planned.tile


def plan_faults(facts: Any, ptx: str, tile: TilePlan) -> list[str]:
    """Where a compiled kernel is not what the plan says: shared memory to the byte, warps, and the consumers' registers."""
    threads = re.search(r"\.reqntid (\d+)", ptx)
    warps = int(threads[1]) // 32 if threads else 0
    dealt = [i.text for i in facts.code if "USETMAXREG" in i.text]
    wrong = {
        f"{facts.shared} B of shared memory, the plan says {tile.on_chip_bytes}": facts.shared != tile.on_chip_bytes,
        f"{warps} warps, the plan says {tile.warps}": warps != tile.warps,
        f"no warpgroup gets the plan's {tile.registers} registers": tile.registers > 0
        and not any(text.endswith(f"{tile.registers:#x}") for text in dealt),
    }
    return [text for text, is_wrong in wrong.items() if is_wrong]
