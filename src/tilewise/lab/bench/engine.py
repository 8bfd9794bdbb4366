"""Run a case: judge every contender first, then time the ones that were right, taking turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.errors import PlanError
from tilewise.lab.bench.accuracy import Errors, errors, truth
from tilewise.lab.bench.cases import Case, Tensors
from tilewise.lab.bench.contenders import Contender
from tilewise.lab.bench.judge import Judgement, judge
from tilewise.lab.bench.timing import Effort, Spread, clock_for, interleave, ratio
from tilewise.model import plan

Progress = Callable[[str, float], None]
OURS = "tilewise"
ROUNDED = 1.01
"""Ratios of errors up to here are 1 where results are rounded to 16 bits: that rounding is nearly all of the error, whoever
computes them."""


class Outcome(NamedTuple):
    """What one call computed, in the case's layout; gradients of q, k, v where the case has a backward."""

    out: Tensor
    grads: tuple[Tensor, ...] = ()


@dataclass
class Result:
    """One contender on one case. `times` is None unless the result was right."""

    contender: str
    judgement: Judgement | None = None
    errors: dict[str, Errors] = field(default_factory=dict)  # where the case asks for them
    times: Spread | None = None
    reasons: tuple[str, ...] = ()  # why it was not run, or how it failed

    @property
    def status(self) -> str:
        if self.reasons:
            return "not run"
        return "ok" if self.judgement and self.judgement.ok else "wrong"

    def to_dict(self) -> dict[str, Any]:
        return {
            "contender": self.contender,
            "status": self.status,
            "reasons": list(self.reasons),
            "judgement": self.judgement.to_dict() if self.judgement else None,
            "errors": {name: found.to_dict() for name, found in self.errors.items()},
            "seconds": self.times._asdict() if self.times else None,
        }


@dataclass
class Record:
    """One case, measured: the results, and how tilewise compares with the contender the case names."""

    case: Case
    results: list[Result]
    ratio: Spread | None = None
    rival: str | None = None  # the fastest of the contenders that the case is measured against
    choice: dict[str, Any] = field(default_factory=dict)  # the backend and plan behind plain `tilewise`

    @property
    def fast(self) -> bool | None:
        """None where the case sets no floor."""
        if self.case.floor is None:
            return None
        return self.ratio is not None and self.ratio.p50 >= self.case.floor

    @property
    def errors(self) -> Errors | None:
        """The worst ratios of our errors to the rival's, over output and gradients."""
        ours, theirs = self.result(OURS), self.result(self.rival or "")
        if not (ours and theirs and ours.errors and theirs.errors):
            return None
        ratios = [mine.over(theirs.errors[name]) for name, mine in ours.errors.items()]
        return Errors(*(max(values) for values in zip(*ratios, strict=True)))

    @property
    def accurate(self) -> bool | None:
        """None where the case does not ask."""
        if not self.case.accurate:
            return None
        limit = ROUNDED if self.case.problem().itemsize == 2 else 1.0
        return self.errors is not None and max(self.errors) <= limit

    @property
    def passed(self) -> bool | None:
        """None where nothing was promised."""
        kept = [promise for promise in (self.fast, self.accurate) if promise is not None]
        return all(kept) if kept else None

    @property
    def right(self) -> bool:
        """Nothing of tilewise's own was wrong or failed."""
        return all(result.status == "ok" for result in self.results if result.contender.startswith(OURS))

    def result(self, contender: str) -> Result | None:
        return next((result for result in self.results if result.contender == contender), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case.to_dict(),
            "words": self.case.words(),
            "choice": self.choice,
            "results": [result.to_dict() for result in self.results],
            "ratio": self.ratio._asdict() if self.ratio else None,
            "rival": self.rival,
            "errors": self.errors.to_dict() if self.errors else None,
            "passed": self.passed,
        }


def bind_run(case: Case, contender: Contender, tensors: Tensors) -> Callable[[], Outcome]:
    """The call to be timed: forward alone, forward and backward, or backward alone."""
    attention = contender.bind(case)
    if not case.trains:
        return lambda: Outcome(attention(tensors.q, tensors.k, tensors.v))
    leaves = tuple(t.detach().requires_grad_() for t in (tensors.q, tensors.k, tensors.v))

    def train() -> Outcome:
        out = attention(*leaves)
        return Outcome(out.detach(), torch.autograd.grad(out, leaves, tensors.dout))

    if case.passes == "training":
        return train
    ready = attention(*leaves)
    return lambda: Outcome(ready.detach(), torch.autograd.grad(ready, leaves, tensors.dout, retain_graph=True))


def chosen(case: Case) -> dict[str, Any]:
    """What stands behind plain `tilewise`: the backend, why not the ones before it, and the planner's tile."""
    problem = case.problem()
    backward = dispatch.select(problem, name=case.backend, backward=True).backend.name if case.trains else None
    selection = dispatch.select(problem, name=case.backend)
    reasons = {name: list(verdict.reasons) for name, verdict in selection.verdicts.items() if not verdict.ok}
    found = {"backend": selection.backend.name, "backward": backward, "not": reasons}
    try:
        planned = plan(problem, case.device, kernels="" if case.backend == "auto" else case.backend).to_dict()
    except PlanError as error:
        return {**found, "plan": None, "no_plan": str(error)}
    return {**found, "plan": {name: planned[name] for name in ("tile", "cpu", "seconds", "binding", "reasons")}}


def measure(case: Case, contenders: Iterable[Contender], effort: Effort, on_progress: Progress | None = None) -> Record:
    """Judge, then time. Who cannot, fails or is wrong stays in the record with the reason and without a speed."""
    say = on_progress or (lambda what, share: None)
    threads = torch.get_num_threads()
    if case.threads:
        torch.set_num_threads(case.threads)
    try:
        tensors = case.tensors()
        want = _truth(case, tensors, threads, say) if case.accurate else {}
        results, runs = [], {}
        for contender in contenders:
            say(f"{case.name}: is {contender.name} right?", 0.0)
            result = Result(contender.name)
            results.append(result)
            verdict = contender.supports(case)
            if not verdict.ok:
                result.reasons = verdict.reasons
                continue
            try:
                run = bind_run(case, contender, tensors)
                outcome = run()
                result.judgement = judge(case, tensors, outcome)
                if want and result.judgement.ok:
                    result.errors = errors(case, want, outcome)
            except Exception as error:  # a peer may fail in any way; the record says how
                result.reasons = (f"{type(error).__name__}: {error}",)
                continue
            if result.judgement.ok:
                runs[contender.name] = run
        samples: dict[str, list[float]] = {}
        if runs:
            samples = interleave(runs, effort, clock_for(case.device), lambda share: say(f"{case.name}: timing", share))
        for result in results:
            if result.contender in samples:
                result.times = Spread.of(samples[result.contender])
        record = Record(case, results, choice=chosen(case))
        rivals = [result for result in results if result.contender in case.against and result.times]
        if OURS in samples and rivals:
            record.rival = min(rivals, key=lambda result: result.times.p50 if result.times else 0.0).contender
            record.ratio = ratio(samples[record.rival], samples[OURS])
        return record
    finally:
        torch.set_num_threads(threads)


def _truth(case: Case, tensors: Tensors, threads: int, say: Progress) -> dict[str, Tensor]:
    """With all threads there are: it may take longer than the measurement."""
    say(f"{case.name}: the result in float64", 0.0)
    fewer = torch.get_num_threads()
    torch.set_num_threads(max(fewer, threads))
    try:
        return truth(case, tensors)
    finally:
        torch.set_num_threads(fewer)


@dataclass(frozen=True)
class Mean:
    """The geometric mean of the ratios of a group of cases; None if one of them has no ratio."""

    group: str
    ratio: float | None
    floor: float

    @property
    def passed(self) -> bool:
        return self.ratio is not None and self.ratio >= self.floor

    def to_dict(self) -> dict[str, Any]:
        return {"group": self.group, "ratio": self.ratio, "floor": self.floor, "passed": self.passed}


def geometric_means(records: Iterable[Record], floors: dict[str, float]) -> list[Mean]:
    """For each group that has cases among the records."""
    ratios: dict[str, list[float | None]] = {}
    for record in records:
        if record.case.group in floors:
            ratios.setdefault(record.case.group, []).append(record.ratio.p50 if record.ratio else None)
    found = []
    for group, values in ratios.items():
        known = [value for value in values if value is not None]
        mean = statistics.geometric_mean(known) if len(known) == len(values) else None
        found.append(Mean(group, mean, floors[group]))
    return found
