"""The main job: attention over one long sequence by standard attention, SDPA and tilewise, each in its own process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from tilewise.bench.cases import Case
from tilewise.bench.engine import OURS
from tilewise.bench.judge import Judgement
from tilewise.bench.machine import available_bytes, machine, versions
from tilewise.bench.timing import Spread
from tilewise.bench.worker import Worker, WorkerError
from tilewise.errors import ArgumentError

STANDARD, SDPA = "standard", "sdpa"
CONTENDERS = (STANDARD, SDPA, OURS)
SCORE_COPIES = 3  # scores, masked scores and weights exist at once while standard attention runs
SPARE = 0.7  # of the free memory standard attention may take this share

Progress = Callable[[str, float], None]


@dataclass
class Run:
    """One contender: peak memory beyond its inputs, times, and how far from float64 it was."""

    contender: str
    peak_bytes: int | None = None
    seconds: list[float] = field(default_factory=list)
    judgement: Judgement | None = None
    reason: str | None = None  # why it was not run

    def to_dict(self) -> dict[str, Any]:
        right = self.judgement is not None and self.judgement.ok
        return {
            "contender": self.contender,
            "peak_bytes": self.peak_bytes,
            "seconds": Spread.of(self.seconds)._asdict() if self.seconds and right else None,
            "judgement": self.judgement._asdict() if self.judgement else None,
            "reason": self.reason,
        }


@dataclass
class Demo:
    case: Case
    runs: dict[str, Run]
    growth: dict[int, int]  # sequence length -> peak bytes of tilewise

    @property
    def ok(self) -> bool:
        ours = self.runs[OURS].judgement
        return ours is not None and ours.ok

    def scores_bytes(self, seqlen: int) -> int:
        """All scores of the case at that length, once: what standard attention stores at least."""
        problem = self.case.problem()
        return problem.batch * problem.heads * seqlen * seqlen * problem.itemsize

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "case": self.case.to_dict(),
            "words": self.case.words(),
            "machine": machine(),
            "versions": versions(),
            "runs": [run.to_dict() for run in self.runs.values()],
            "growth": [
                {"seqlen": seqlen, "peak_bytes": peak, "scores_bytes": self.scores_bytes(seqlen)}
                for seqlen, peak in self.growth.items()
            ],
        }


def too_big(case: Case) -> str | None:
    """Why standard attention cannot be run on the case, if it cannot."""
    problem = case.problem()
    need = SCORE_COPIES * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k * problem.itemsize
    free = available_bytes()
    if case.device != "cpu" or free is None or need <= SPARE * free:
        return None
    return f"needs {need / 2**30:.1f} GiB for its scores, {free / 2**30:.1f} GiB are free"


def run_demo(case: Case, rounds: int, on_progress: Progress) -> Demo:
    """Memory and error once each; times in `rounds` rounds in which the contenders take turns."""
    if case.kv_seqlen is not None:
        raise ArgumentError("kv_seqlen: the demo attends over one sequence; leave it out")
    runs = {name: Run(name) for name in CONTENDERS}
    runs[STANDARD].reason = too_big(case)
    lengths = [case.seqlen >> shift for shift in (3, 2, 1)]
    steps = 3 * len(CONTENDERS) + len(CONTENDERS) * rounds + len(lengths)
    done = 0

    def step(what: str) -> None:
        nonlocal done
        on_progress(what, done / steps)
        done += 1

    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(case, name)) for name, run in runs.items() if run.reason is None}
        for question in ("ready", "memory", "judge", *["time"] * rounds):
            for name, worker in list(workers.items()):
                step(f"{name}: {PHRASES[question]}")
                try:
                    answer(runs[name], question, worker.ask(question))
                except WorkerError as error:
                    runs[name].reason = str(error)
                    del workers[name]
    growth = {}
    for seqlen in lengths if runs[OURS].peak_bytes is not None else ():
        step(f"{OURS}: memory at {seqlen:,} tokens")
        with Worker(replace(case, seqlen=seqlen), OURS) as worker:
            growth[seqlen] = worker.ask("memory")["peak_bytes"]
    if runs[OURS].peak_bytes is not None:
        growth[case.seqlen] = runs[OURS].peak_bytes
    return Demo(case, runs, growth)


PHRASES = {"ready": "starting", "memory": "peak memory", "judge": "error against float64", "time": "timing"}


def answer(run: Run, question: str, found: dict[str, Any]) -> None:
    """Enter a worker's answer; the first run, which touches fresh memory, is not a timing."""
    if question == "memory":
        run.peak_bytes = found["peak_bytes"]
    elif question == "judge":
        run.judgement = Judgement(**found)
    elif question == "time":
        run.seconds.append(found["seconds"])
