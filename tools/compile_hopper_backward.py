"""Compile the Hopper backward's kernels for sm_90 without a GPU, and hold their machine code to what makes them fast.

python tools/compile_hopper_backward.py                          all of them with the triton at hand
python tools/compile_hopper_backward.py --triton 3.6.0 3.9.0     the same under other versions
python tools/compile_hopper_backward.py --only causal
python tools/compile_hopper_backward.py --few                    one of each kind
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "tools")]

MASKS = {
    "full": "None",
    "causal": "tw.causal()",
    "window": "tw.causal() & tw.window(100)",
    "padding": "tw.key_padding(torch.tensor([5, 6]))",
    "prefix-lm": "tw.causal() | tw.prefix(9)",
}
AROUND = ("preprocess_kernel", "postprocess_kernel")


class Case(NamedTuple):
    name: str
    d: int = 128
    dv: int = 128
    mask: str = "None"
    dtype: str = "bfloat16"
    softcap: float = 0.0
    varlen: bool = False
    deterministic: bool = False


WIDTHS = (64, 128, 256)
CASES = [
    *(Case(f"d{d} {name}", d, d, mask) for d in WIDTHS for name, mask in MASKS.items()),
    *(
        Case(f"d{d} {name} deterministic", d, d, MASKS[name], deterministic=True)
        for d in (64, 128)
        for name in ("full", "causal")
    ),
    *(Case(f"d{d} dv{dv} causal", d, dv, MASKS["causal"]) for d, dv in ((128, 64), (64, 256), (256, 64), (192, 128))),
    *(Case(f"d{d} fp16", d, d, dtype="float16") for d in WIDTHS),
    *(Case(f"d{d} softcap", d, d, MASKS["causal"], softcap=20.0) for d in WIDTHS),
    *(
        Case(f"d{d} causal varlen deterministic", d, d, MASKS["causal"], varlen=True, deterministic=True)
        for d in (64, 128)
    ),
    Case("d128 softcap deterministic", mask=MASKS["causal"], softcap=20.0, deterministic=True),
    *(Case(f"d{d} {name} varlen", d, d, MASKS[name], varlen=True) for d in WIDTHS for name in ("full", "causal")),
]
FEW = ("d64 full", "d128 causal", "d256 causal", "d128 causal varlen", "d64 causal deterministic")


def compiled(case: Case) -> list[tuple[str, Any, Any]]:
    """Name, kernel and config of each kernel."""
    import torch
    from triton.backends.compiler import GPUTarget

    import tilewise as tw
    from tilewise.backends.hopper.backward.plan import make_plan
    from tilewise.backends.hopper.compile import compile_kernel
    from tilewise.problem import Problem

    problem = Problem.of(
        batch=2,
        heads=4,
        seqlen=3072,
        head_dim=case.d,
        head_dim_v=case.dv,
        dtype=case.dtype,
        softcap=case.softcap,
        varlen=case.varlen,
        deterministic=case.deterministic,
        mask=eval(case.mask, {"tw": tw, "torch": torch}),
    )
    target = GPUTarget("cuda", 90, 32)
    plan = make_plan(problem, 132, lambda name, *what: compile_kernel(target, name, *what))
    return [(step.name, step.kernel, step.config) for step in plan.steps]


def spilling(case: Case, name: str, newer: bool) -> bool:
    """Kernels that are right and lack registers: softcap at 128 (ten to thirty values a step wait in memory), packed batches at
    64 (two or three); from Triton 3.8 on others too."""
    if name == "queries_kernel":
        return newer
    return newer or (case.softcap > 0 and case.d == 128) or (case.varlen and case.d == 64)


def faults(name: str, facts: Any, config: Any, may_spill: bool = False) -> list[str]:
    """What is not as it should be."""
    if name in AROUND:
        narrow = not facts.count("LDG.E.128")
        return ["rows are not read 16 bytes at a time"] if narrow else []
    from tilewise.backends.gpu.sass import lost_addresses

    loops, lost = facts.loops, lost_addresses(facts.code)
    reduces = getattr(config, "REDUCE_DQ", False)
    products, waits = (sum(loop.count(what) for loop in loops) for what in ("HGMMA", "WARPGROUP.DEPBAR"))
    saved = sum(loop.count("LDL", "STL") for loop in loops)
    found = {
        f"ptxas: {facts.complaints}": facts.complaints,
        f"addresses of products are lost: {lost[:3]}": lost,
        f"{len(loops)} loops multiply, expected one for each warpgroup": len(loops) != 2,
        f"{saved} accesses to local memory in loops": not may_spill and saved > ALLOWED_SAVES,
        f"{facts.stack} bytes of registers saved in memory": not may_spill and facts.stack > ALLOWED_STACK,
        "weights do not come from registers": not all(loop.register_products for loop in loops),
        f"{waits} waits for {products} products": waits * 3 > products,
        "dQ is not added up four numbers at a time": reduces and not facts.count("REDG.E.ADD.F32x4"),
        "registers are not shared out": not facts.count("USETMAXREG"),
        f"barriers among the tiles: {facts.barriers}": not facts.barriers_apart,
        "tiles are not loaded by TMA": not facts.count("UTMALDG"),
        f"{facts.shared} bytes of shared memory, the table says {config.shared_bytes}": facts.shared
        > config.shared_bytes,
    }
    return [fault for fault, there in found.items() if there]


ALLOWED_SAVES = 4
"""In both loops together: at head dim 64 one register more than there are waits in memory for a step."""
ALLOWED_STACK = 64
"""Outside the loops registers may wait in memory: once for a tile, not once for a step."""


def run_here(cases: list[Case]) -> int:
    import triton
    from tools.sass import facts

    from tilewise.backends.hopper.plan import newer_registers

    failures = 0
    for case in cases:
        start = time.perf_counter()
        try:
            kernels = compiled(case)
        except Exception as error:
            while error.__cause__ is not None:  # the innermost one names the line
                error = error.__cause__
            failures += 1
            print(f"{case.name:26} FAILED {type(error).__name__}: {str(error)[-800:]}", flush=True)
            continue
        for name, kernel, config in kernels:
            found = facts(kernel)
            wrong = faults(name, found, config, spilling(case, name, newer_registers()))
            failures += bool(wrong)
            saved = sum(loop.count("LDL", "STL") for loop in found.loops)
            print(
                f"triton {triton.__version__}  {case.name:26} {name:15} {found.stack:3} B stack  {saved:3} saves in loops  "
                f"{found.shared:6} B shared  {time.perf_counter() - start:5.1f} s  {'; '.join(wrong)}",
                flush=True,
            )
    print(f"{failures} failures")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", nargs="*", default=[], help="versions to compile under")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name must hold one of")
    parser.add_argument("--few", action="store_true", help="one case of each kind")
    options = parser.parse_args()
    if options.triton:
        from other_triton import run_under

        arguments = [*(["--only", *options.only] if options.only else []), *(["--few"] if options.few else [])]
        return max(run_under(version, __file__, arguments) for version in options.triton)
    cases = [case for case in CASES if case.name in FEW] if options.few else CASES
    return run_here([case for case in cases if not options.only or any(word in case.name for word in options.only)])


if __name__ == "__main__":
    sys.exit(main())
