"""Compile the GPU kernels without a GPU, and check their machine code.

    python tools/compile_kernels.py                          every case for every target, with the triton at hand
    python tools/compile_kernels.py --few                    a choice of them
    python tools/compile_kernels.py --triton 3.6.0 3.9.0     under other versions, each in a directory of its own
    python tools/compile_kernels.py --only hopper --target sm_90

Each line is one kernel for one target: registers and stack bytes a thread (NVIDIA), shared memory, the time it took, and what is
wrong with it. A kernel fails the run that does not compile, does not fit the target, multiplies with memory that is none of its
tiles (lost addresses: `backends/gpu/sass.py`), spills where it must not, lacks what its speed rests on (`machine_code.py`), or is
not what its backend's plan says of it: shared memory, registers, buffers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tools.compile_checks import (  # noqa: E402
    BY_NAME,
    CAREFUL,
    CHECKED,
    CHECKS,
    CLASSIFIER,
    DERIVATIVES,
    ROWS,
    STATISTICS,
    TARGETS,
    Check,
    problem_of,
)

from tilewise.lab.bench.cases import Case  # noqa: E402


class Compiled(NamedTuple):
    name: str
    kernel: Any
    config: Any
    text: str = ""  # its tile
    seconds: float = 0.0
    tile: Any = None  # as planned
    whole: bool = True  # does the launch compute all that its tile is planned for?


def compile_check(check: Check, target: str, kernels: tuple[str, ...] = ()) -> Iterator[Compiled]:
    """A check's kernels, compiled for a target; raises what the compiler raises."""
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget(*TARGETS[target].gpu)
    problem, inputs = problem_of(check)
    if check.backend == "triton":
        yield from _portable(check, problem, inputs, gpu, target, kernels or check.kernels)
        return
    from tools.hopper_launches import jvp_kernel, planned_kernels

    start = time.perf_counter()
    if check.backend == "hopper-jvp":
        name, kernel, config, tile = jvp_kernel(problem, gpu, check.moving)
        yield Compiled(name, kernel, config, str(tile), time.perf_counter() - start, tile)
        return
    for name, kernel, config, tile in planned_kernels(problem, gpu, backward=check.backend != "hopper"):
        yield Compiled(name, kernel, config, str(tile), time.perf_counter() - start, tile)


def _portable(
    check: Check, problem: Any, inputs: Any, gpu: Any, target: str, kernels: tuple[str, ...]
) -> Iterator[Compiled]:
    from tools.gpu_launches import (
        derivative_launches,
        launches,
        page_launches,
        pass_of,
        row_launches,
        statistics_launches,
    )

    from tilewise.backends.base import Needs
    from tilewise.backends.gpu.launch import compile_for, signature
    from tilewise.backends.triton import plan
    from tilewise.hardware import device

    spec = device(TARGETS[target].device)
    tiles = plan.tiles(problem, spec)
    derived, watched, by_row = (bool(kernels) and set(kernels) <= set(names) for names in (DERIVATIVES, STATISTICS, ROWS))
    if check.page:
        found = page_launches(problem, inputs, spec, check.scaled)
    elif derived:
        found = derivative_launches(problem, inputs, spec)
    elif watched:
        found = statistics_launches(problem, inputs, spec)
    elif by_row:
        found = row_launches(problem, inputs)
    else:
        found = launches(problem, inputs, spec, maps=check.maps)
    if problem.seqlen_q > 1 and not (derived or watched or by_row) and not check.page:
        found += launches(problem, inputs, spec, needs=Needs(dbias=inputs.bias is not None), maps=check.maps)
    # the same kernel may serve several operands, and one of a name may come in two forms
    different = {(name, str(signature(launch.args))): launch for name, launch in found if not kernels or name in kernels}
    for (name, _), launch in different.items():
        start = time.perf_counter()
        config, options = launch.config, launch.options
        kernel = compile_for(gpu, launch.kernel, signature(launch.args), config, options)
        sizes = (getattr(config, name, 0) for name in ("BLOCK_M", "BLOCK_N"))
        text = f"{'x'.join(map(str, sizes))} w{options.num_warps} s{options.num_stages}"
        whole = name != "keys" or launch.args[1].dk is not None  # where dK and dV are computed apart, dV takes less
        unplanned = (*CLASSIFIER, *CAREFUL, *DERIVATIVES, *STATISTICS, *ROWS, "append", "join")
        planned = None if name in unplanned else tiles[pass_of(name, tiles)]
        yield Compiled(name, kernel, config, text, time.perf_counter() - start, planned, whole)


TIGHT = ("window", "padding", "varlen", "softcap")
"""With these, head dim 256 spills from Triton 3.8 on, loops included: right, but slower. 3.6 and 3.7 have registers for all."""
DERIVATIVE_SPILLS = {("jvp", 128): 48, ("second_keys", 64): 44, ("second_keys", 128): 108}
"""Accesses to local memory in the loops of derivatives for sm_90, by head dim (22 to 41 and 92 to 103 counted for dK and dV)."""


def short_of_registers(case: Case) -> bool:
    """Backward kernels that are right and lack registers: softcap at 128 (ten to thirty values a step wait in memory), dropout at
    128 (two), ALiBi at 128 (one under Triton 3.6, thirty where keys lie ahead); from Triton 3.8 on others too."""
    return case.head_dim == 128 and (case.softcap > 0 or case.dropout_p > 0 or case.alibi)


def backward_saves(name: str, case: Case) -> int:
    """Accesses to local memory that both loops of a backward kernel may have, together."""
    if name == "keys_kernel" and case.head_dim == 64 and case.data:
        return 1  # under Triton 3.7, in the branch that zeroes queries that see no key
    if name == "keys_kernel" and case.head_dim == 64 and case.bias is not None and case.dropout_p > 0:
        return 2
    return 0


def full_of_features(case: Case) -> bool:
    """Hopper kernels that are right and lack registers: ALiBi and dropout at 256 columns (seven accesses a step), the gradient of
    a bias there; outside of loops dropout at 64 and a bias at 128 (56 and 48 bytes)."""
    full = case.alibi or case.dropout_p > 0 or case.bias is not None
    tight = (case.head_dim == 64 and case.dropout_p > 0) or (case.head_dim == 128 and case.bias is not None)
    return tight or (case.head_dim == 256 and full)


def has_room(config: Any) -> bool:
    """64 queries at head dim 64 with dQ's sums: the backward's kernel that has registers for every feature."""
    return getattr(config, "REDUCE_DQ", False) and config.BLOCK_M == config.BLOCK_D == 64


def tuned_spills(check: Check, tile: Any, target: str) -> int:
    """Accesses to local memory in loops that a tile may have which was measured to be the fastest although it spills.

    The same source compiles to slightly different code from run to run (127 or 129 accesses for dK/dV at head dim 256), so a
    tile may have two more than recorded, or 5 %.
    """
    from tilewise.backends.triton.tuned import TUNED
    from tilewise.problem import ITEMSIZE

    dims = (check.case.head_dim, ITEMSIZE[check.case.dtype])
    same = (
        entry.spills
        for entry in TUNED
        if (entry.arch, entry.pass_, entry.block_q, entry.block_k) == (target, tile.pass_, *tile.sizes)
        and (entry.head_dim, entry.itemsize) == dims
    )
    most = max(same, default=0)
    return most and most + max(2, most // 20)


def faults(check: Check, compiled: Compiled, target: str, strict: bool = True) -> tuple[Any, list[str]]:
    """The facts of a compiled kernel, and what is wrong with it. Without `strict`, under other versions, spills are no fault and
    plans are not compared."""
    from tools import gpu_launches
    from tools.hopper_launches import plan_faults
    from tools.machine_code import backward_faults, facts, forward_faults, invariant_faults, jvp_faults, portable_faults

    from tilewise.backends.hopper.compiler import newer_registers
    from tilewise.hardware import device

    newer = check.backend != "triton" and newer_registers()
    known = facts(compiled.kernel, target in CHECKED, warnings=check.backend != "triton")
    if check.backend == "hopper":
        tight = check.case.head_dim == 256 and any(word in check.name for word in TIGHT)
        planned = plan_faults(known, compiled.kernel.asm["ptx"], compiled.tile) if strict else []
        listed = getattr(compiled.config, "LISTS", None) is not None  # from Triton 3.8 on, as with what is tight
        seen = "entropy" in check.stats  # 2 accesses a step and 264 bytes at head dim 128 under 3.9; none under 3.6 and 3.7
        may_spill = (newer and (tight or listed or seen)) or full_of_features(check.case)
        return known, [*forward_faults(known, compiled.config, may_spill, newer), *planned]
    if check.backend == "hopper-jvp":
        planned = plan_faults(known, compiled.kernel.asm["ptx"], compiled.tile) if strict else []
        return known, [*jvp_faults(known, compiled.config, newer), *planned]
    if check.backend == "hopper-backward":
        may_spill = newer or (compiled.name != "queries_kernel" and short_of_registers(check.case))
        may_spill |= full_of_features(check.case)
        may_spill = newer if has_room(compiled.config) else may_spill
        may_spill |= 0 < known.spills <= backward_saves(compiled.name, check.case)
        planned = plan_faults(known, compiled.kernel.asm["ptx"], compiled.tile) if strict else []
        return known, [*backward_faults(compiled.name, known, compiled.config, may_spill), *planned]
    columns = getattr(compiled.kernel.metadata, "tmem_size", 0)
    may_spill = known.spills <= check.spills or not strict or compiled.name in CAREFUL or (
        compiled.tile is not None and known.spills <= tuned_spills(check, compiled.tile, target)
    )
    if target == "sm_90" and known.spills <= DERIVATIVE_SPILLS.get((compiled.name, check.case.head_dim), -1):
        may_spill = True
    wrong = portable_faults(known, columns, device(TARGETS[target].device).sram_per_block, may_spill)
    if strict and check.invariant and compiled.name != "merge" and known.code:
        wrong += invariant_faults(known)
    if strict and compiled.tile is not None:  # what other versions lay out is their affair
        pipelined = compiled.whole and not check.loose
        wrong += gpu_launches.plan_faults(known, compiled.kernel.asm.get("ptx", ""), compiled.tile, pipelined)
    return known, wrong


def run_job(job: tuple[str, str, bool]) -> tuple[list[str], int]:
    """In a worker process: the lines to print for one check and target, and how many of them are failures."""
    import triton

    name, target, strict = job
    check, lines, failures = BY_NAME[name], [], 0
    head = f"triton {triton.__version__}  {target:7} {check.name:34}"
    try:
        for one in compile_check(check, target):
            known, wrong = faults(check, one, target, strict)
            failures += bool(wrong)
            spills = known.spills if known.code else "?"
            lines.append(
                f"{head} {one.name:17} {one.text:15} {known.registers:4} regs {known.stack:5} B stack {spills:>4} in loops "
                f"{known.shared:7} B shared{_planned(one.tile)} {one.seconds:6.1f} s  {'; '.join(wrong)}"
            )
    except Exception as error:
        while error.__cause__ is not None:  # the innermost one names the line
            error = error.__cause__
        lines.append(f"{head} FAILED {type(error).__name__}: {str(error)[-800:]}")
        failures += 1
    return lines, failures


def _planned(tile: Any) -> str:
    return "" if tile is None else f" of {tile.on_chip_bytes:7} planned"


def run_here(options: argparse.Namespace) -> int:
    """Every chosen check for every target, in as many processes as asked for."""
    words = options.only or [""]
    chosen = [check for check in CHECKS if any(word in check.name for word in words) and (check.few or not options.few)]
    targets = [(check, target) for target in options.target or TARGETS for check in chosen if target in check.targets]
    jobs = [(check.name, target, not options.any_spills) for check, target in targets]
    failures = 0
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for lines, bad in pool.map(run_job, jobs):
            failures += bad
            print("\n".join(lines), flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def run_under(version: str, arguments: list[str]) -> int:
    """The exit status with another triton, which is installed beside the environment's on first use."""
    home = ROOT / "build" / f"triton-{version}"
    if not home.exists():
        unfinished = home.with_name(f"{home.name}.part")  # renamed when whole: an interrupted installation is not taken for one
        shutil.rmtree(unfinished, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished)]
        subprocess.run([*install, f"triton=={version}"], check=True)
        unfinished.rename(home)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), str(ROOT / "src"), str(ROOT)])}
    return subprocess.run([sys.executable, __file__, *arguments], env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", nargs="*", default=[], help="versions to compile under instead of the environment's")
    parser.add_argument("--target", nargs="*", choices=list(TARGETS))
    parser.add_argument("--few", action="store_true", help="only a choice of checks")
    parser.add_argument("--any-spills", action="store_true", help="spilled registers of portable kernels are no failure")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--only", nargs="*", help="words of which a check's name holds one, such as hopper or d128")
    options = parser.parse_args()
    if not options.triton:
        return run_here(options)
    # registers are the assembler's business, which comes with triton: tiles are chosen for the environment's
    return max(run_under(version, [*sys.argv[1:], "--any-spills", "--triton"]) for version in options.triton)


if __name__ == "__main__":
    sys.exit(main())
