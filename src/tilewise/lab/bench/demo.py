"""The main job: attention over one long sequence by standard attention, SDPA and tilewise, each in its own process."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tilewise.lab.bench.cases import OURS, Case
from tilewise.lab.bench.engine import chosen
from tilewise.lab.bench.judge import Judgement
from tilewise.lab.bench.machine import available_bytes, machine, versions
from tilewise.lab.bench.timing import Progress, Spread
from tilewise.lab.bench.worker import Worker, WorkerError

STANDARD, SDPA = "standard", "sdpa"
CONTENDERS = (STANDARD, SDPA, OURS)
SCORE_COPIES = {"forward": 3, "training": 6}  # scores, masked scores, weights; then their gradients
BUDGET = 35.0  # seconds after which no new round is begun
SPARE = 0.7  # of the free memory standard attention may take this share
PHRASES = {"memory": "peak memory", "judge": "error against float64", "time": "timing"}


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
            **vars(self),
            "seconds": Spread.of(self.seconds)._asdict() if self.seconds and right else None,
            "judgement": self.judgement.to_dict() if self.judgement else None,
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

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "case": self.case.to_dict(),
            "words": self.case.words(),
            "choice": chosen(self.case),
            "machine": machine(),
            "versions": versions(),
            "runs": [run.to_dict() for run in self.runs.values()],
            "growth": [
                {"seqlen": seqlen, "peak_bytes": peak, "scores_bytes": self.case.scores_bytes(seqlen)}
                for seqlen, peak in self.growth.items()
            ],
        }


def too_big(case: Case) -> str | None:
    """Why standard attention cannot be run on the case, if it cannot."""
    need, free = SCORE_COPIES[case.passes] * case.scores_bytes(case.seqlen), available_bytes()
    if case.device != "cpu" or free is None or need <= SPARE * free:
        return None
    return f"needs {need / 2**30:.1f} GiB for its scores, {free / 2**30:.1f} GiB are free"


def run_demo(case: Case, rounds: int, on_progress: Progress) -> Demo:
    """Memory and error once each; times in rounds in which the contenders take turns, fewer where time runs out."""
    begin = time.perf_counter()
    runs = {name: Run(name) for name in CONTENDERS}
    runs[STANDARD].reason = too_big(case)
    growth: dict[int, int] = {}
    lengths = [case.seqlen >> shift for shift in (3, 2, 1, 0)]
    questions: list[tuple[str, dict[str, int]]] = [("memory", {"seqlen": seqlen}) for seqlen in lengths]
    questions += [("judge", {}), *[("time", {})] * rounds]
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(case, name)) for name, run in runs.items() if run.reason is None}
        for done, (question, arguments) in enumerate(questions):
            if question == "time" and runs[OURS].seconds and time.perf_counter() - begin > BUDGET:
                break
            short = arguments.get("seqlen", case.seqlen) < case.seqlen
            for turn, (name, worker) in enumerate(list(workers.items())):
                if short and name != OURS:
                    continue
                on_progress(f"{name}: {PHRASES[question]}", (done + turn / len(CONTENDERS)) / len(questions))
                try:
                    found = worker.ask(question, **arguments)
                except WorkerError as error:
                    runs[name] = Run(name, reason=str(error))
                    del workers[name]
                    continue
                if question == "judge":
                    runs[name].judgement = Judgement(**found)
                elif question == "time":  # not the first runs, which touch fresh memory
                    runs[name].seconds.append(found["seconds"])
                else:
                    runs[name].peak_bytes = found["peak_bytes"]
                    if name == OURS:
                        growth[arguments["seqlen"]] = found["peak_bytes"]
    return Demo(case, runs, growth)

