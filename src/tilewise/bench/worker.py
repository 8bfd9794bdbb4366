"""One contender in a process of its own, so that its peak memory is the operating system's figure and nobody else's.

The parent starts a Worker for each contender and lets them take turns; the child answers each question by a JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewise.bench.cases import Case
from tilewise.errors import TilewiseError

WARM_SEQLEN = 256


class WorkerError(TilewiseError, RuntimeError):
    """A contender's process ended or answered with an error."""


class Worker:
    """The parent's end: `ask` a question, get a dict. Use as a context manager; leaving it ends the process."""

    def __init__(self, case: Case, contender: str) -> None:
        self.contender = contender
        spec = {"case": case.to_dict(), "contender": contender}
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tilewise.bench.worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout and self.process.stderr
        try:
            self.process.stdin.write(json.dumps({"ask": question, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = self.process.stderr.read().strip().splitlines()[-1:] or [f"exit status {self.process.wait()}"]
            raise WorkerError(f"{self.contender}: its process ended while asked to {question}: {tail[0]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.contender}: {answer['error']}")
        return answer


class Child:
    """The other end: holds the tensors and answers."""

    def __init__(self, case: Case, contender: str) -> None:
        import torch

        from tilewise.bench.contenders import contender as by_name
        from tilewise.bench.engine import bind_run

        self.case, self.contender = case, by_name(contender)
        if case.threads:
            torch.set_num_threads(case.threads)
        self.tensors = case.tensors()
        # A short run of the same kind loads libraries, threads and compiled kernels before memory is looked at.
        small = replace(
            case, seqlen=min(case.seqlen, WARM_SEQLEN), kv_seqlen=min(case.kv_seqlen or case.seqlen, WARM_SEQLEN)
        )
        bind_run(small, self.contender, small.tensors())()
        self.run = bind_run(case, self.contender, self.tensors)

    def ready(self) -> dict[str, Any]:
        return {}

    def memory(self) -> dict[str, Any]:
        """The first run: bytes it needed beyond its inputs, output included, and its time."""
        if self.case.device.startswith("cuda"):
            return self.memory_cuda()
        from tilewise.bench.memory import forget_peak, resident

        forget_peak()
        before = resident().now
        seconds = self.time()["seconds"]
        return {"peak_bytes": max(0, resident().peak - before), "seconds": seconds}

    def memory_cuda(self) -> dict[str, Any]:
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = self.time()["seconds"]
        return {"peak_bytes": torch.cuda.max_memory_allocated() - before, "seconds": seconds}

    def time(self) -> dict[str, Any]:
        from tilewise.bench.timing import clock_for

        return {"seconds": clock_for(self.case.device)(self.run, 1)}

    def judge(self) -> dict[str, Any]:
        from tilewise.bench.judge import judge

        return judge(self.case, self.tensors, self.run())._asdict()


def serve() -> None:
    spec = json.loads(sys.argv[1])
    child: Child | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            child = child or Child(Case(**spec["case"]), spec["contender"])
            answer = getattr(child, question["ask"])()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
