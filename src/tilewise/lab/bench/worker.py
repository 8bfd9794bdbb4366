"""Contenders in processes of their own: one whose peak memory is to be the operating system's figure, one of another checkout
of tilewise, or several that compile kernels side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from tilewise.backends.base import Verdict
from tilewise.errors import ArgumentError, TilewiseError
from tilewise.lab.bench.cases import OURS, Case, Tensors
from tilewise.lab.bench.child import Outcome
from tilewise.lab.bench.timing import Timer

OWN_SOURCE = Path(__file__).resolve().parents[3]
SETTLE = 5e-3
"""Seconds until the threads of one process that wait for more work have gone to sleep, and leave the cores to another's."""


class WorkerError(TilewiseError, RuntimeError):
    """A contender's process ended or answered with an error."""


class Worker:
    """The parent's end: `ask` a question, get a dict. Use as a context manager; leaving it ends the process."""

    def __init__(self, case: Case | None = None, name: str = OURS, source: Path = OWN_SOURCE) -> None:
        self.name = name
        self.spec: dict[str, Any] = {}
        if case is not None:
            self.take(case, name)
        paths = os.pathsep.join(p for p in (str(source), os.environ.get("PYTHONPATH")) if p)
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def take(self, case: Case, name: str) -> None:
        """A case and a contender: what the next questions are about."""
        self.name = name
        self.specify(case, case=case.to_dict(), contender=name)

    def specify(self, case: Case, /, **spec: Any) -> None:
        self.spec = {**spec, "device": case.device, "threads": case.threads, "passes": case.passes}

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps({"ask": question, "spec": self.spec, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            tail = self.errors.read().strip().splitlines()[-1:] or [f"exit status {status}"]
            raise WorkerError(f"{self.name}: its process ended while asked to {question}: {tail[0]}")
        answer: dict[str, Any] = json.loads(line)
        if "failure" in answer:
            raise WorkerError(f"{self.name}: {answer['failure']}")
        return answer


class Checkout(Worker):
    """A contender that is the tilewise of a source folder, in a process of its own."""

    def __init__(self, name: str, source: Path) -> None:
        super().__init__(None, name, source)
        self.calls, self.folder = 0, tempfile.TemporaryDirectory()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.folder.cleanup()

    def supports(self, case: Case) -> Verdict:
        return Verdict(True)

    def is_judged(self, case: Case) -> bool:
        return True

    def take(self, case: Case, name: str = "") -> None:
        """Hand over its tensors."""
        self.start(case, case.tensors())

    def start(self, case: Case, tensors: Tensors) -> tuple[Callable[[], Outcome], Timer]:
        """Hand over the tensors; give what it computes, and its timer."""
        import torch

        self.calls += 1
        call, out = (Path(self.folder.name) / name for name in (f"call{self.calls % 2}", "out"))
        torch.save({"options": case.options(tensors), "tensors": list(tensors[:4])}, call)
        self.specify(case, call=str(call), number=self.calls)

        def outcome() -> Outcome:
            self.ask("run", file=str(out))
            first, *grads = torch.load(out, map_location=case.device, weights_only=True)
            return Outcome(first, tuple(grads))

        def seconds(number: int) -> float:
            time.sleep(SETTLE)
            taken: float = self.ask("time", number=number)["seconds"]
            time.sleep(SETTLE)
            return taken

        return outcome, seconds


def source_folder(path: Path) -> Path:
    """The folder that holds the package, of a checkout or of its `src`."""
    for folder in (path, path / "src"):
        if (folder / "tilewise" / "__init__.py").is_file():
            return folder.resolve()
    raise ArgumentError(f"against: {path} holds no tilewise; name a checkout or its src folder")


def compile_ahead(jobs: Iterable[tuple[Case, str, Path | None]], processes: int, on_done: Callable[[str], None]) -> None:
    """Run each case once in one of several processes, so that its kernels lie on disk before anything is timed.

    A job is a case and a contender of this checkout, or the source folder of the checkout to run. Failures come again, and are
    told, when the case is measured.
    """
    waiting: dict[Path | None, list[tuple[Case, str]]] = {}
    for case, name, source in jobs:
        waiting.setdefault(source, []).append((case, name))

    def work(source: Path | None, queue: Iterator[tuple[Case, str]]) -> None:
        with Worker() if source is None else Checkout("", source) as worker:
            for case, name in queue:
                on_done(f"{case.name}: compiling {name}")
                try:
                    worker.take(case, name)
                    worker.ask("run")
                except WorkerError:
                    if worker.process.poll() is not None:
                        return

    each = max(1, processes // max(1, len(waiting)))
    with ThreadPoolExecutor(each * len(waiting) or 1) as pool:
        queues = [(source, iter(queue), min(each, len(queue))) for source, queue in waiting.items()]  # threads share one
        started = [pool.submit(work, source, queue) for source, queue, number in queues for _ in range(number)]
    for done in started:
        done.result()
