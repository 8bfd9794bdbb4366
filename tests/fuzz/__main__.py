"""Fuzz attention: `make fuzz MINUTES=10`, or, with src on the path, `python -m tests.fuzz`.

    python -m tests.fuzz --minutes 5 --seed 1 --workers 2
    python -m tests.fuzz --device cuda --backend triton,hopper --minutes 3 --seed 7 --workers 8
    python -m tests.fuzz --case 3000123 --backend cpu --shrink        one case again, and the smallest like it that fails

Cases are drawn by `draw`, judged by `judge`, and run by workers, so that a crash costs one case and is told with its number.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress

from tests.fuzz.case import Case, snippet
from tests.fuzz.draw import draw
from tests.fuzz.run import ROOT, Books, Failure, Lane, run
from tests.fuzz.shrink import shrink

CPU = "cpu,aten,tiled,reference,auto,triton"
INTERPRETER_SHARE = 0.15
"""Of the time: the interpreter takes a second for what a kernel does in a millisecond."""
SHRUNK = 2
"""Failures of each backend that are made smaller at the end."""


def lanes_of(device: str, backends: list[str]) -> list[tuple[Lane, float]]:
    """Which backends share a process, and their share of the time."""
    if device != "cpu":
        return [(Lane("gpu", device, tuple(backends)), 1.0)]
    kernels = [name for name in backends if name != "triton"]
    interpreted = Lane("interpreter", device, ("triton",), interpret=True)
    if not kernels:
        return [(interpreted, 1.0)]
    if "triton" not in backends:
        return [(Lane("cpu", device, tuple(kernels)), 1.0)]
    return [(Lane("cpu", device, tuple(kernels)), 1 - INTERPRETER_SHARE), (interpreted, INTERPRETER_SHARE)]


def fuzz(given: argparse.Namespace) -> int:
    backends = given.backend.split(",")
    books = Books()
    with tempfile.TemporaryDirectory() as kernels:
        os.environ.setdefault("TILEWISE_CACHE_DIR", kernels)  # thousands of kernels that nobody will need again
        with suppress(KeyboardInterrupt):  # what was found so far is told all the same
            for lane, share in lanes_of(given.device, backends):
                cases, seconds = round(given.cases * share) if given.cases else 10**9, 60 * given.minutes * share
                run(lane, books, seed=given.seed, workers=given.workers, seconds=seconds, cases=cases)
        print(books.line(), books.table(), sep="\n", flush=True)
        if not books.failures:
            return 0 if books.cases else 1
        explain(books.failures)
    return 1


def explain(failures: list[Failure]) -> None:
    """Each failure in a line, and the first of each backend made smaller."""
    print(f"\n{len(failures)} failures:")
    for failure in failures[:40]:
        print(f"  case {failure.number} on {failure.backend}: {failure.words[:240]}")
    seen: Counter[str] = Counter()
    for failure in failures:
        seen[failure.backend] += 1
        if seen[failure.backend] > SHRUNK or failure.backend == "worker":
            continue
        words = ["--case", str(failure.number), "--backend", failure.backend, "--device", failure.device, "--shrink"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        command = [sys.executable, "-m", "tests.fuzz", *words]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
            told = done.stdout if done.returncode == 1 else f"{done.stdout}\nends with status {done.returncode}"
        except subprocess.TimeoutExpired:
            told = "takes more than three minutes"
        print(f"\npython -m tests.fuzz {' '.join(words[:-1])}\n{told.strip()}", flush=True)


def again(given: argparse.Namespace) -> int:
    """One case by its number."""
    if given.device == "cpu" and given.backend == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
    from tests.fuzz.judge import judge

    case = draw(given.case)
    print(case)
    status = 0
    for backend in given.backend.split(","):
        verdict = judge(case, backend, given.device)
        for words in verdict.failures or [f"refused: {'; '.join(verdict.refused)}" if verdict.refused else "right"]:
            print(f"{backend}: {words}", flush=True)
        if verdict.failures:
            status = 1
            if given.shrink:

                def fails(simpler: Case, backend: str = backend) -> bool:
                    return bool(judge(simpler, backend, given.device).failures)

                small = shrink(case, fails)
                print(f"smaller:\n{snippet(small, backend, given.device)}\n{judge(small, backend, given.device)}")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--cases", type=int, default=0, help="stop after about so many; 0: when the minutes are over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="", help=f"separated by commas; {CPU}, on a GPU triton,hopper,auto")
    parser.add_argument("--case", type=int, default=None, help="run this case alone")
    parser.add_argument("--shrink", action="store_true", help="make a failing case smaller")
    given = parser.parse_args()
    given.backend = given.backend or (CPU if given.device == "cpu" else "triton,hopper,auto")
    return fuzz(given) if given.case is None else again(given)


if __name__ == "__main__":
    sys.exit(main())
