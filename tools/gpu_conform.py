"""The conformance suite on the GPU, shared out over processes; it needs no pytest beyond the name.

What is wrong is told when it is found and kept in the record from then on: a run that is cut has said all it knew.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

from gpu_timing import DEVICE, RECORDS, Clock

from tilewise.backends.gpu.launch import interpreting

NEIGHBOURS = 3
"""Cases that follow each other often share kernels: one process takes them."""
RESERVE = 5.0
"""Seconds of the time limit for ending the processes and the record."""
BEGUN, NOT_SERVED = "begun", "not served"
TIMES = ("as it comes", "recorded", "repeated")


def judged(case: Any) -> str:
    """What is wrong with a case on the GPU, and at which of its three calls; empty if nothing is."""
    from tests.conformance.cases import build
    from tests.conformance.harness import excesses
    from tilewise import dispatch

    try:
        built = build(case, "cpu" if interpreting() else DEVICE)
        if not dispatch.judge("triton", built.problem, built.inputs).ok:
            return NOT_SERVED
        wrong = []
        for occasion in TIMES:
            found = excesses(built, "triton", lse_gradient=case.lse_gradient)
            wrong += [f"{occasion}: {excess}" for excess in found]
        return "; ".join(wrong)[:900]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-400:]}"


def work(todo: Any, done: Any) -> None:
    """A worker process: takes names of cases, tells of each that it has begun and what was found."""
    if importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = types.ModuleType("pytest")
    from tests.conformance.cases import BY_NAME

    for names in iter(todo.get, None):
        for name in names:
            done.put((name, BEGUN))
            done.put((name, judged(BY_NAME[name])))


def shared_out(names: list[str], workers: int, clock: Clock) -> Iterator[tuple[str, str]]:
    """(name, what was found) of each case as it comes in, until all have or time is up. Ends its processes in any case."""
    context = multiprocessing.get_context("spawn")
    # plain queues have no thread of their own: what was put is there, even if its process dies next
    todo, done = context.Queue(), context.SimpleQueue()
    for i in range(0, len(names), NEIGHBOURS):
        todo.put(names[i : i + NEIGHBOURS])
    crew = [context.Process(target=work, args=(todo, done), daemon=True) for _ in range(workers)]
    for worker in crew:
        todo.put(None)
        worker.start()
    missing = set(names)
    try:
        while missing and clock.left() > RESERVE:
            alive = any(worker.is_alive() for worker in crew)
            if done.empty():
                if not alive:
                    return
                time.sleep(0.1)
                continue
            name, found = done.get()
            if found != BEGUN:
                missing.discard(name)
            yield name, found
    finally:
        for worker in crew:
            worker.kill()  # its own process; in a compiler or on the GPU it would not hear of anything less
        todo.cancel_join_thread()


def conform(clock: Clock, args: argparse.Namespace) -> None:
    """Every case, or those of `--cases`."""
    sys.modules.setdefault("pytest", types.ModuleType("pytest"))
    from tests.conformance.cases import CASES

    names = [case.name for case in CASES if not args.cases or case.name in args.cases]
    found: dict[str, str] = {}
    begun: set[str] = set()
    RECORDS.append({"case": "conformance", "of": len(names), "found": found})
    for name, why in shared_out(names, min(args.workers, len(names)), clock):
        if why == BEGUN:
            begun.add(name)
            continue
        found[name] = why
        args.save()
        if why not in ("", NOT_SERVED):
            print(f"  WRONG {name}: {why}", flush=True)
    wrong = [name for name, why in found.items() if why not in ("", NOT_SERVED)]
    refused = [name for name, why in found.items() if why == NOT_SERVED]
    print(f"  {len(found) - len(wrong) - len(refused)} right, {len(wrong)} wrong {wrong}, not served: {refused}")
    if left := [name for name in names if name not in found]:
        print(f"  left out: {left}, of which begun: {[name for name in left if name in begun]}", flush=True)
