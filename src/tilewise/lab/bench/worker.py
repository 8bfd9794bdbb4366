"""One contender in a process of its own, so that its peak memory is the operating system's figure and nobody else's.

The parent starts a Worker for each contender and lets them take turns; the child answers each question by a JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.errors import TilewiseError
from tilewise.lab.bench.cases import Case

if TYPE_CHECKING:
    from tilewise.lab.bench.engine import Outcome

WARM_SEQLEN = 32  # so short that the memory it leaves behind hides nothing


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
            [sys.executable, "-m", "tilewise.lab.bench.worker", json.dumps(spec)],
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
        if "failure" in answer:
            raise WorkerError(f"{self.contender}: {answer['failure']}")
        return answer


class Child:
    """The other end: holds the tensors and answers."""

    def __init__(self, case: Case, contender: str) -> None:
        import torch

        from tilewise.lab.bench.contenders import contender as by_name

        self.case, self.contender = case, by_name(contender)
        if case.threads:
            torch.set_num_threads(case.threads)
        self.tensors = case.tensors()
        # A short run of the same kind loads libraries, threads and compiled kernels before memory is looked at.
        self.bind(min(case.seqlen, WARM_SEQLEN))()
        self.before = self.forget()

    def bind(self, seqlen: int) -> Callable[[], Outcome]:
        """The call over the first `seqlen` tokens, on views of the same tensors."""
        from tilewise.lab.bench.engine import bind_run

        axis = 2 if self.case.layout == "bhsd" else 1
        views = type(self.tensors)(*(x.narrow(axis, 0, seqlen) for x in self.tensors))
        return bind_run(replace(self.case, seqlen=seqlen), self.contender, views)

    def forget(self) -> int:
        """Start a new peak; the bytes in use now."""
        if self.case.device.startswith("cuda"):
            import torch

            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        from tilewise.lab.bench.memory import forget_peak, resident

        forget_peak()
        return resident().now

    def peak(self) -> int:
        if self.case.device.startswith("cuda"):
            import torch

            return torch.cuda.max_memory_allocated()
        from tilewise.lab.bench.memory import resident

        return resident().peak

    def memory(self, seqlen: int) -> dict[str, Any]:
        """The most bytes needed so far beyond q, k and v: output, workspace and any mask the contender must be given.

        Asked for growing lengths. The base is the use before the first run, for memory that a run has freed may still
        be resident when the next one begins and would hide its need.
        """
        self.run = self.bind(seqlen)
        self.outcome = self.run()
        return {"peak_bytes": max(0, self.peak() - self.before)}

    def judge(self) -> dict[str, Any]:
        from tilewise.lab.bench.judge import judge

        return judge(self.case, self.tensors, self.outcome)._asdict()

    def time(self) -> dict[str, Any]:
        from tilewise.lab.bench.timing import clock_for

        return {"seconds": clock_for(self.case.device)(self.run, 1)}


def serve() -> None:
    spec = json.loads(sys.argv[1])
    child: Child | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            child = child or Child(Case(**spec["case"]), spec["contender"])
            answer = getattr(child, question.pop("ask"))(**question)
        except Exception as error:
            answer = {"failure": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
