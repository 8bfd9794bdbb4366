"""The Hopper forward on a Hopper GPU: is it right, and how fast beside cuDNN, FlashAttention-2 and, where installed, -4?

    python benchmarks/gpu_hopper.py [--only compile,check,stress,time,host] [--dims 64,128+] [--out file.json]

Kernels are compiled first, in parallel; "128+" times variants of the tile too. Every group of checks and every head dim's timing
is a process of its own under a time limit, so that a kernel that hangs costs seconds. A result outside the derived bounds of the
fp64 oracle gets no speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parent)]

from gpu_hopper_shapes import groups  # noqa: E402
from gpu_hopper_tasks import (  # noqa: E402
    FA4_MASKS,
    check_group,
    compile_fa4,
    compile_share,
    host_time,
    machine,
    rates_line,
    stress,
    time_dim,
)


def child(task: str, argument: str, limit: float) -> dict[str, Any]:
    """A task in a process of its own; what it printed last is its result."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--task", task, "--argument", argument]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else (late.stdout or "")
        return {"failed": f"no answer in {limit:.0f} s", "printed": printed[-3000:]}
    seconds = time.perf_counter() - start
    if done.returncode:
        return {"failed": (done.stderr.strip() or done.stdout)[-1500:], "printed": done.stdout[-3000:], "seconds": seconds}
    return {**json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "check": check_group,
    "compile": lambda what: compile_share(what) if "/" in what else compile_fa4(what),
    "time": time_dim,
    "host": lambda _: host_time(),
    "stress": lambda _: stress(),
    "machine": lambda _: machine(),
}


def show(phase: str, name: str, result: dict[str, Any]) -> None:
    if "failed" in result:
        print(f"{phase:8} {name:22} FAILED: {result['failed']}\n{result.get('printed', '')}", flush=True)
    elif phase == "check":
        wrong, seconds = len(result["wrong"]), result["seconds"]
        print(f"check    {name:22} {result['checked']:3} shapes, {wrong} wrong, {seconds:.0f} s", flush=True)
        for line in result["wrong"][:4]:
            print("         ", line[:600], flush=True)
    elif phase == "time":
        for cell, row in result.items():
            if cell != "seconds":
                print(rates_line(cell, row["tflops"]), row.get("wrong") or "", flush=True)
    else:
        print(f"{phase:8} {name} {json.dumps(result)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="compile,check,time,host")
    parser.add_argument("--dims", default="128,64,256")
    parser.add_argument("--groups", default="", help="only groups of checks whose names contain one of these words")
    parser.add_argument("--out", default=None)
    parser.add_argument("--task", default=None)
    parser.add_argument("--argument", default="")
    options = parser.parse_args()
    if options.task:
        print(json.dumps(TASKS[options.task](options.argument)), flush=True)
        return
    phases = options.only.split(",")
    words = options.groups.split(",")
    names = [name for name in groups() if any(word in name for word in words)]
    dims = options.dims.split(",")
    record: dict[str, Any] = {"machine": child("machine", "", 40)}
    shares = [f"{i}/14" for i in range(14)]
    peers = [f"{d} {mask}" for d in (64, 128, 256) for mask in (FA4_MASKS if d == 128 else FA4_MASKS[:2])]
    work = {
        "compile": (peers + shares, 22, 200),
        "check": (names, 12, 60),
        "stress": (["all"], 1, 60),
        "time": (dims, 1, 120),
        "host": (["tiny call"], 1, 40),
    }
    for phase in phases:
        items, together, limit = work[phase]
        begin = time.perf_counter()
        with ThreadPoolExecutor(together) as pool:
            for name, result in zip(items, pool.map(lambda n, p=phase, s=limit: child(p, n, s), items), strict=True):
                record.setdefault(phase, {})[name] = result
                if phase != "compile" or "failed" in result:
                    show(phase, name, result)
        print(f"-- {phase}: {time.perf_counter() - begin:.0f} s", flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
