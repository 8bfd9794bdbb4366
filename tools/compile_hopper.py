"""Compile the Hopper kernels for sm_90 without a GPU, and hold their machine code to what makes them fast.

python tools/compile_hopper.py                          all of them with the triton at hand
python tools/compile_hopper.py --triton 3.6.0 3.9.0     the same under other versions, each in a directory of its own
python tools/compile_hopper.py --only causal
python tools/compile_hopper.py --few                    one of each kind
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "tools")]


class Case(NamedTuple):
    name: str
    d: int = 128
    dv: int = 128
    mask: str = "None"
    queries: int = 3072
    dtype: str = "bfloat16"
    softcap: float = 0.0
    scale: float | None = None
    varlen: bool = False


PADDING = "tw.key_padding(torch.tensor([5, 6]))"
MASKS = {
    "full": "None",
    "causal": "tw.causal()",
    "window": "tw.causal() & tw.window(100)",
    "padding": PADDING,
    "causal padding": f"tw.causal() & {PADDING}",
    "prefix-lm": "tw.causal() | tw.prefix(9)",
    "offsets": "tw.causal(offset=torch.tensor([1, 2]))",
}
WIDTHS = (64, 128, 256)
CASES = [
    *(Case(f"d{d} {name}", d, d, mask) for d in WIDTHS for name, mask in MASKS.items()),
    *(Case(f"d{d} dv{dv} causal", d, dv, MASKS["causal"]) for d in WIDTHS for dv in WIDTHS if d != dv),
    *(Case(f"d{d} {name} short", d, d, MASKS[name], 512) for d in (64, 128) for name in ("full", "causal")),
    Case("d256 full short", 256, 256, queries=512),
    Case("d64 causal 2048 queries", 64, 64, MASKS["causal"], 2048),
    Case("d128 wide window", 128, 128, "tw.causal() & tw.window(2000)"),
    *(Case(f"d{d} full tail", d, d, queries=3000) for d in WIDTHS),
    *(Case(f"d{d} fp16", d, d, dtype="float16") for d in WIDTHS),
    *(Case(f"d{d} softcap", d, d, MASKS["causal"], softcap=20.0) for d in WIDTHS),
    *(
        Case(f"d{d} {name} varlen", d, d, MASKS[name], varlen=True)
        for d in WIDTHS
        for name in ("full", "causal", "window")
    ),
    Case("negative scale", scale=-1.0),
    Case("d256 full long", 256, 256, queries=16384),
]


FEW = ("d64 full", "d64 causal", "d128 full", "d128 window", "d128 causal varlen", "d256 causal", "d256 full long")
TIGHT = ("window", "padding", "varlen", "softcap")
"""With these, head dim 256 spills from Triton 3.8 on, loops included: right, but slower. 3.6 and 3.7 have registers for all."""


def tight(case: Case) -> bool:
    return case.d == 256 and any(word in case.name for word in TIGHT)


def compiled(case: Case) -> tuple[Any, Any]:
    """The kernel and its config."""
    import torch
    from triton.backends.compiler import GPUTarget

    import tilewise as tw
    from tilewise.backends.hopper.compile import compile_kernel
    from tilewise.backends.hopper.plan import make_plan
    from tilewise.problem import Problem

    problem = Problem.of(
        batch=2,
        heads=4,
        seqlen=case.queries,
        head_dim=case.d,
        head_dim_v=case.dv,
        dtype=case.dtype,
        softcap=case.softcap,
        scale=case.scale,
        varlen=case.varlen,
        mask=eval(case.mask, {"tw": tw, "torch": torch}),
    )
    target = GPUTarget("cuda", 90, 32)
    plan = make_plan(problem, 132, lambda *what: compile_kernel(target, "forward_kernel", *what))
    return plan.kernel, plan.config


def faults(facts: Any, config: Any, may_spill: bool = False) -> list[str]:
    """What is not as it should be; `may_spill`: registers are too few."""
    from tools.sassflow import unwritten

    from tilewise.backends.gpu.sass import lost_addresses
    from tilewise.backends.hopper.plan import newer_registers

    loops = facts.loops
    allowed = ALLOWED_STACK_NEWER if newer_registers() else ALLOWED_STACK
    if config.BLOCK_DV == 256 and (config.LEFT or config.UNSEEN_KEYS):
        allowed = max(allowed, ALLOWED_STACK_WIDEST)
    least = config.WARPGROUPS * (1 + (config.BAND and config.PINGPONG) + config.LEFT)
    held = (config.BLOCK_N + config.Q_IN_REGISTERS) // 16  # products take 16 columns of their left operand
    unknown, lost = unwritten(facts.code), lost_addresses(facts.code)
    found = {
        f"ptxas: {facts.complaints}": facts.complaints,
        f"registers are read that some path leaves unwritten: {unknown[:3]}": unknown,
        f"addresses of products are lost: {lost[:3]}": lost,
        f"{len(loops)} loops multiply, expected {least}": len(loops) != least,
        "a loop uses local memory": not may_spill and any(loop.count("LDL", "STL") for loop in loops),
        f"{facts.stack} bytes of registers saved in memory": not may_spill and facts.stack > allowed,
        "weights or queries do not come from registers": any(loop.register_products != held for loop in loops),
        "the output is rescaled where no row needs it": config.LAZY_RESCALE and not all(loop.count("VOTE") for loop in loops),
        # of two rounded numbers, so that a row whose maximum stays is rescaled by exactly 1: one product a weight, two for sums
        "the rescaling factor is not exp2 of a plain difference": config.SCORES == "fold"
        and any(loop.count("FFMA") != config.BLOCK_N // 2 + 2 for loop in loops),
        "the softmax waits for P·V": not all(loop.overlaps for loop in loops),
        "registers are not shared out": not facts.count("USETMAXREG"),
        f"barriers among the tiles: {facts.barriers}": not facts.barriers_apart,
        "tiles are not loaded by TMA": not facts.count("UTMALDG"),
        f"{facts.shared} bytes of shared memory, the table says {config.shared_bytes}": facts.shared
        > config.shared_bytes,
    }
    return [fault for fault, there in found.items() if there]


ALLOWED_STACK = 32
"""Outside the loops a handful of registers may wait in memory: once for a tile of queries, not once for a tile of keys."""
ALLOWED_STACK_WIDEST = 64
"""The same with 256 columns of output, 128 registers, where rows begin after key 0 or keys are seen by no query."""
ALLOWED_STACK_NEWER = 192
"""The same from Triton 3.8 on, where three warpgroups at head dim 64 keep 42 registers there."""


def selected(options: argparse.Namespace) -> list[Case]:
    cases = [case for case in CASES if case.name in FEW] if options.few else CASES
    return [case for case in cases if not options.only or any(word in case.name for word in options.only)]


def run_here(cases: list[Case]) -> int:
    import triton
    from tools.sass import facts

    from tilewise.backends.hopper.plan import newer_registers

    failures = 0
    for case in cases:
        start = time.perf_counter()
        try:
            kernel, config = compiled(case)
            found = facts(kernel)
            wrong = faults(found, config, tight(case) and newer_registers())
        except Exception as error:
            while error.__cause__ is not None:  # the innermost one names the line
                error = error.__cause__
            failures += 1
            print(
                f"triton {triton.__version__}  {case.name:24} FAILED {type(error).__name__}: {str(error)[-800:]}",
                flush=True,
            )
            continue
        failures += bool(wrong)
        print(
            f"triton {triton.__version__}  {case.name:24} {found.stack:3} B stack  {found.shared:6} B shared  "
            f"{len(found.code):5} instructions  {time.perf_counter() - start:5.1f} s  {'; '.join(wrong)}",
            flush=True,
        )
    print(f"{failures} failures")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", nargs="*", default=[], help="versions to compile under")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name must hold")
    parser.add_argument("--few", action="store_true", help="one case of each kind")
    options = parser.parse_args()
    if not options.triton:
        return run_here(selected(options))
    from other_triton import run_under

    arguments = [*(["--only", *options.only] if options.only else []), *(["--few"] if options.few else [])]
    return max(run_under(version, __file__, arguments) for version in options.triton)


if __name__ == "__main__":
    sys.exit(main())
