"""Compile the GPU kernels without a GPU and look at what came out.

    python tools/compile_matrix.py                          the whole matrix with the triton at hand
    python tools/compile_matrix.py --triton 3.6.0 3.9.0     the same under other versions, each in a directory of its own
    python tools/compile_matrix.py --only forward --target sm_90

Each row is one kernel for one target: registers and spilled bytes a thread (NVIDIA), shared memory, and the time it took.
A kernel that fails to compile, does not fit the target, multiplies with memory that is none of its tiles (lost addresses:
`backends/gpu/sass.py`), or spills where `must_not_spill`, fails the run (the latter with the environment's triton only).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
TENSOR_COLUMNS = 512
"""Tensor memory of a Blackwell multiprocessor."""
SPECS = {"sm_80": "a100-80", "sm_90": "h200", "sm_100": "b200", "gfx942": "mi300x"}


class Case(NamedTuple):
    """One problem whose kernels are compiled."""

    name: str
    kernels: tuple[str, ...] = ("forward", "keys", "queries")
    dtype: str = "bfloat16"
    d: int = 128
    dv: int = 128
    mask: str = ""
    features: tuple[str, ...] = ()
    must_not_spill: bool = False
    varlen: bool = False
    maps: bool | None = None
    target: str = ""
    """Only for this one."""


class Result(NamedTuple):
    case: str
    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    seconds: float
    tile: str
    fits: bool  # a kernel that does not fit compiles to a trap, or is refused at its launch
    lost: list[str]  # products that multiply with the wrong memory


CASES = (
    Case("d128", mask="causal()", must_not_spill=True),
    Case("d64", d=64, dv=64, mask="causal()", must_not_spill=True),
    Case("d128 full", must_not_spill=True),
    Case("fp32 d128", ("forward", "keys", "queries", "fp16_split"), dtype="float32", mask="causal()"),
    Case("fp32 decode", ("decode", "merge"), dtype="float32"),
    Case("d256", d=256, dv=256, mask="causal()"),
    Case("d512", ("forward",), d=512, dv=512),
    Case("d96 dv32 prefix", d=96, dv=32, mask="causal() | prefix(7)"),
    Case("window fp16", dtype="float16", mask="window(64)"),
    Case("varlen", mask="causal()", varlen=True),
    Case(
        "everything",
        ("forward", "keys", "queries", "bias"),
        d=64,
        dv=64,
        features=("softcap", "bias", "alibi", "sinks", "dropout"),
    ),
    Case("documents", mask="documents", d=64, dv=64),
    Case("blocks and dense", mask="blocks", d=64, dv=64),
    Case("decode", ("decode", "merge")),
    Case("prepare", ("prepare",)),
    *(
        Case(
            f"d{d} {mask or 'full'}{' varlen' * varlen}{' short' * (not maps)}",
            d=d,
            dv=d,
            mask=mask,
            varlen=varlen,
            maps=maps,
            target="sm_90",
        )
        for d in (64, 128)
        for mask in ("", "causal()")
        for varlen in (False, True)
        for maps in (False, True)
    ),
)
"""The last ones are all that ptxas 12.8 is trusted with (`backends/gpu/assemble.py`): it is looked through for lost addresses."""


BACKWARD = {"prepare", "keys", "queries", "bias"}
MAIN = ("d128", "d64", "fp32 d128", "fp32 decode", "varlen", "everything", "documents", "decode", "prepare")
"""Enough to see that another triton takes the language the kernels use."""


def mask_of(name: str, length: int) -> Any:
    import torch

    import tilewise.masks as masks

    if name == "documents":
        return masks.causal() & masks.documents(torch.zeros(2, length, dtype=torch.int32))
    if name == "blocks":
        table = torch.ones(1, 1, length // 64, length // 64, dtype=torch.bool)
        return masks.blocks(table, 64) | ~masks.dense(torch.ones(2, 1, length, length, dtype=torch.bool))
    return masks.parse(name) if name else masks.full()


def problem_of(case: Case) -> tuple[Any, Any]:
    """The problem and tensors without storage."""
    import torch

    from tilewise.backends.base import Inputs
    from tilewise.masks import Binding
    from tilewise.problem import Problem

    batch, heads, kv_heads, length, keys = 2, 8, 2, 1024, 1024
    if "decode" in case.kernels:
        length, keys = 1, 4096
    has = case.features.__contains__
    problem = Problem.of(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen=length,
        kv_seqlen=keys,
        head_dim=case.d,
        head_dim_v=case.dv,
        dtype=case.dtype,
        mask=mask_of(case.mask, length),
        softcap=30.0 if has("softcap") else 0.0,
        bias=(1, heads, length, keys) if has("bias") else None,
        alibi=has("alibi"),
        sinks=has("sinks"),
        dropout_p=0.1 if has("dropout") else 0.0,
        varlen=case.varlen,
        device="cuda",
    )
    problem.memory["program"] = problem.mask.lower(Binding(problem.shape, problem.varlen, torch.as_tensor))
    dtype = getattr(torch, case.dtype)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = 1 if case.varlen else batch
    return problem, Inputs(
        empty(rows, heads, length, case.d),
        empty(rows, kv_heads, keys, case.d),
        empty(rows, kv_heads, keys, case.dv),
        bias=empty(1, heads, length, keys) if has("bias") else None,
        alibi=empty(1, heads, dtype=torch.float32) if has("alibi") else None,
        sinks=empty(heads) if has("sinks") else None,
        seed=empty(1, dtype=torch.int64) if has("dropout") else None,
        cu_q=empty(batch + 1, dtype=torch.int32) if case.varlen else None,
        cu_k=empty(batch + 1, dtype=torch.int32) if case.varlen else None,
    )


def compile_case(case: Case, target: str, kernels: tuple[str, ...] | None = None) -> Iterator[Result]:
    """Compile a case's kernels for a target; raises what the compiler raises."""
    from gpu_launches import launches
    from triton.backends.compiler import GPUTarget

    from tilewise.backends.base import Needs
    from tilewise.backends.gpu.launch import compile_for, signature
    from tilewise.hardware import device

    problem, inputs = problem_of(case)
    wanted = kernels or case.kernels
    spec = device(SPECS[target])
    found = launches(problem, inputs, spec, maps=case.maps)
    if set(wanted) & BACKWARD:
        found += launches(problem, inputs, spec, needs=Needs(dbias=inputs.bias is not None), maps=case.maps)
    # the same kernel may serve several operands, and one of a name may come in two forms
    different = {(name, str(signature(launch.args))): (name, launch) for name, launch in found if name in wanted}
    for name, launch in different.values():
        start = time.perf_counter()
        config, options = launch.config, launch.options
        compiled = compile_for(GPUTarget(*TARGETS[target]), launch.kernel, signature(launch.args), config, options)
        registers, spilled, lost = resources(compiled, target)
        seconds = time.perf_counter() - start
        text = f"{config.BLOCK_M}x{config.BLOCK_N} w{options.num_warps} s{options.num_stages}"
        used = compiled.metadata.shared
        fits = used <= spec.sram_per_block and getattr(compiled.metadata, "tmem_size", 0) <= TENSOR_COLUMNS
        yield Result(case.name, name, target, registers, spilled, used, seconds, text, fits, lost)


def resources(compiled: Any, target: str) -> tuple[int, int, list[str]]:
    """Registers and spilled bytes a thread, as the assembler's own tool reports them, and lost addresses; nothing for AMD."""
    if "cubin" not in compiled.asm:
        return 0, 0, []
    import tempfile

    from triton import knobs

    from tilewise.backends.gpu.sass import disassembled, lost_addresses

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lost = lost_addresses(disassembled(compiled.asm["cubin"])) if target == "sm_90" else []
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2]), lost) if found else (0, 0, lost)


def compile_job(job: tuple[str, str, bool]) -> tuple[list[str], int]:
    """In a worker process: the lines to print for one case and target, and how many of them are failures."""
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]
    import triton

    name, target, strict = job
    case = next(case for case in CASES if case.name == name)
    lines, failures = [], 0
    head = f"triton {triton.__version__}  {target:7} {case.name:20}"
    try:
        for r in compile_case(case, target):
            spills = strict and case.must_not_spill and target == "sm_90" and r.spilled > 0
            failures += spills or not r.fits or bool(r.lost)
            lines.append(
                f"{head} {r.kernel:8} {r.tile:15} {r.registers:4} regs {r.spilled:5} B spilled {r.shared:7} B shared"
                f" {r.seconds:6.1f} s{'  SPILLS' * spills}{'  DOES NOT FIT' * (not r.fits)}"
                f"{'  LOST ADDRESSES ' + str(r.lost[:2]) if r.lost else ''}"
            )
    except Exception as error:
        while error.__cause__ is not None:  # the innermost one names the line
            error = error.__cause__
        lines.append(f"{head} FAILED {type(error).__name__}: {str(error)[-800:]}")
        failures += 1
    return lines, failures


def run_here(options: argparse.Namespace) -> int:
    """Every case for every target, in as many processes as asked for."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    names = [c.name for c in CASES if not options.only or any(w in c.name or w in c.kernels for w in options.only)]
    only = {c.name: c.target for c in CASES}
    if options.main:
        names = [name for name in names if name in MAIN or only[name]]
    targets = options.target or list(TARGETS)
    jobs = [(name, t, not options.any_spills) for t in targets for name in names if only[name] in ("", t)]
    failures = 0
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for lines, bad in pool.map(compile_job, jobs):
            failures += bad
            print("\n".join(lines), flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--triton", nargs="*", default=[], help="versions to compile under instead of the environment's"
    )
    parser.add_argument("--target", nargs="*", choices=list(TARGETS))
    parser.add_argument("--main", action="store_true", help="only a choice of cases")
    parser.add_argument("--any-spills", action="store_true", help="spilled registers are shown, but no failure")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--only", nargs="*", help="words that a case's name or kernels must match")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools"), str(ROOT)]
    if not options.triton:
        return run_here(options)
    from other_triton import run_under

    # registers are the assembler's business, which comes with triton: tiles are chosen for the environment's
    arguments = [
        "--any-spills",
        "--jobs",
        str(options.jobs),
        *(["--main"] if options.main else []),
        *(["--target", *options.target] if options.target else []),
        *(["--only", *options.only] if options.only else []),
    ]
    return max(run_under(version, __file__, arguments) for version in options.triton)


if __name__ == "__main__":
    sys.exit(main())
