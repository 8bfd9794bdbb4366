"""Run a case: judge every contender first, then time the ones that were right, taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.diagnostics.plan import plan
from tilewise.errors import ArgumentError, PlanError
from tilewise.hardware.timers import clock_for
from tilewise.lab.bench import caches
from tilewise.lab.bench.accuracy import Errors, errors, truth
from tilewise.lab.bench.caches import CacheTensors
from tilewise.lab.bench.cases import OURS, Case, Tensors
from tilewise.lab.bench.child import Outcome, bind_passes
from tilewise.lab.bench.judge import Expected, Judgement
from tilewise.lab.bench.machine import require_device
from tilewise.lab.bench.peers import COMPILED, Contender, contender, default_peers
from tilewise.lab.bench.timing import Effort, Progress, Spread, Timer, interleave, ratio, silent
from tilewise.lab.bench.worker import OWN_SOURCE, Checkout, compile_ahead, source_folder

ROUNDED = 1.01
"""Ratios of errors up to here are 1 where results are rounded to 16 bits: that rounding is nearly all of the error, whoever
computes them."""


@dataclass
class Result:
    """One contender on one case. `times` is None unless the result was right."""

    contender: str
    judgement: Judgement | None = None
    errors: dict[str, Errors] = field(default_factory=dict)  # where the case asks for them
    times: Spread | None = None
    reasons: tuple[str, ...] = ()  # why it was not run, or how it failed
    judged: bool = True  # False: it computes something else by design, and was timed alone
    bytes: int | None = None  # of K and V in a cache that it reads

    @property
    def status(self) -> str:
        if self.reasons:
            return "not run"
        if not self.judged:
            return "not judged"
        return "ok" if self.judgement and self.judgement.ok else "wrong"

    @property
    def rate(self) -> float | None:
        """Bytes of K and V a second."""
        return self.bytes / self.times.p50 if self.bytes and self.times else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "contender": self.contender,
            "status": self.status,
            "reasons": list(self.reasons),
            "judgement": self.judgement.to_dict() if self.judgement else None,
            "errors": {name: found.to_dict() for name, found in self.errors.items()},
            "seconds": self.times._asdict() if self.times else None,
            **({"bytes": self.bytes, "rate": self.rate} if self.bytes else {}),
        }


@dataclass
class Record:
    """One case, measured: the results, and how tilewise compares with the contender the case names."""

    case: Case
    results: list[Result]
    ratio: Spread | None = None
    rival: str | None = None  # the fastest of the contenders that the case is measured against
    choice: dict[str, Any] = field(default_factory=dict)  # the backend and plan behind plain `tilewise`
    checkouts: dict[str, Spread] = field(default_factory=dict)  # our speed in that of other checkouts, round by round
    least: dict[str, Spread] = field(default_factory=dict)  # the same of contenders that the case has floors for, one by one

    @property
    def contested(self) -> bool:
        """Did a contender that the case is measured against take part, or fail to?"""
        return any(self.result(name) for name in self.case.against)

    @property
    def fast(self) -> bool | None:
        """None where the case sets no floor, or no rival was asked for."""
        kept = [self.reaches(name, floor) for name, floor in self.case.least if self.result(name)]
        if self.case.floor is not None and self.contested:
            kept.append(self.ratio is not None and self.ratio.p50 >= self.case.floor)
        ours = self.result(OURS)
        if self.case.rate is not None and ours is not None:
            kept.append(ours.rate is not None and ours.rate >= self.case.rate)
        return all(kept) if kept else None

    def reaches(self, name: str, floor: float) -> bool:
        return name in self.least and self.least[name].p50 >= floor

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
        """None where the case does not ask, or no rival was asked for."""
        if not (self.case.accurate and self.contested):
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
            "checkouts": {name: spread._asdict() for name, spread in self.checkouts.items()},
            **({"least": {name: spread._asdict() for name, spread in self.least.items()}} if self.case.least else {}),
            "errors": self.errors.to_dict() if self.errors else None,
            "passed": self.passed,
        }


def bind_run(case: Case, contender: Contender, tensors: Tensors) -> Callable[[], Outcome]:
    """A contender's call, on tensors in its own layout; what it computes comes back in the case's."""
    own, bias = contender.layout, tensors.bias
    learned = (bias,) if bias is not None and bias.requires_grad else ()
    if own in (None, case.layout):
        return bind_passes(contender.bind(case, tensors), tensors[:3], tensors.dout, case.passes, learned)
    *qkv, dout = (x.transpose(1, 2) for x in tensors[:4])
    if contender.copies:
        *qkv, dout = (x.contiguous() for x in (*qkv, dout))
    run = bind_passes(contender.bind(case, tensors), tuple(qkv), dout, case.passes, learned)

    def back() -> Outcome:
        out, grads = run()
        return Outcome(out.transpose(1, 2), tuple(grad.transpose(1, 2) for grad in grads))

    return back


def start(case: Case, contender: Contender | Checkout, tensors: Any) -> tuple[Callable[[], Outcome], Timer]:
    """What a contender computes, and its timer."""
    if isinstance(contender, Checkout):
        return contender.start(case, tensors)
    if case.cache:
        form = contender.form(case)
        turns = caches.Turns(form, contender.bind(form, tensors))
        return turns, turns.timer(clock_for(case.device))
    run = bind_run(case, contender, tensors)
    return run, partial(clock_for(case.device), run)


def chosen(case: Case) -> dict[str, Any]:
    """What stands behind plain `tilewise`: the backend, why not the ones before it, and the tiles it runs with."""
    if case.cache:
        return caches.chosen_over(case)
    problem = case.problem()
    backward = dispatch.select(problem, name=case.backend, backward=True).backend.name if case.trains else None
    selection = dispatch.select(problem, name=case.backend)
    reasons = {name: list(verdict.reasons) for name, verdict in selection.verdicts.items() if not verdict.ok}
    found = {"backend": selection.backend.name, "backward": backward, "not": reasons}
    try:
        planned = plan(problem, case.device, backend=case.backend).to_dict()
    except PlanError as error:
        return {**found, "plan": None, "no_plan": str(error)}
    names = ("figures_of", "tile", "passes", "seconds", "ceilings", "binding", "reasons")
    return {**found, "plan": {name: planned[name] for name in names}}


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Measured(NamedTuple):
    """Contenders on one case: what each computed, and its samples in seconds, round by round, if that was right."""

    results: dict[str, Result]
    samples: dict[str, list[float]]


def judge_and_time(
    case: Case, contenders: Sequence[Contender | Checkout], effort: Effort, on_progress: Progress = silent
) -> Measured:
    """Judge, then time, taking turns. Who cannot, fails or is wrong has a reason and no samples."""
    every = torch.get_num_threads()
    with torch_threads(case.threads):
        tensors: Any = CacheTensors(case) if case.cache else case.tensors()
        want: dict[str, Tensor] = {}
        if case.accurate:
            on_progress(f"{case.name}: the result in float64", 0.0)
            with torch_threads(max(every, torch.get_num_threads())):  # it may take longer than the measurement
                want = truth(case, tensors)
        on_progress(f"{case.name}: float64 oracle", 0.0)
        expected = None if case.cache else Expected(case, tensors)
        results: dict[str, Result] = {}
        timers: dict[str, Timer] = {}
        for one in contenders:
            on_progress(f"{case.name}: is {one.name} right?", 0.0)
            result = results[one.name] = Result(one.name, reasons=one.supports(case).reasons)
            if result.reasons:
                continue
            try:
                run, timer = start(case, one, tensors)
                outcome, result.judged = run(), one.is_judged(case)
                if not result.judged:
                    timers[one.name] = timer
                    continue
                if expected is not None:
                    result.judgement = expected.judge(outcome)
                elif isinstance(one, Contender):
                    form = one.form(case)
                    result.judgement, result.bytes = caches.judge(form, tensors, outcome.out), caches.bytes_read(form)
                assert result.judgement is not None
                if result.judgement.ok:
                    result.errors = errors(case, want, outcome) if want else {}
                    timers[one.name] = timer
            except Exception as error:  # a peer may fail in any way; the record says how
                result.reasons = (f"{type(error).__name__}: {error}",)
        tell = partial(on_progress, f"{case.name}: timing")
        samples = interleave(timers, effort.on(case.device), tell) if timers else {}
        for name, values in samples.items():
            results[name].times = Spread.of(values)
        return Measured(results, samples)


def measure(
    case: Case, contenders: Sequence[Contender | Checkout], effort: Effort, on_progress: Progress = silent
) -> Record:
    """A case with its contenders. Who cannot, fails or is wrong stays in the record with the reason and without a speed."""
    results, samples = judge_and_time(case, contenders, effort, on_progress)
    with torch_threads(case.threads):
        record = Record(case, list(results.values()), choice=chosen(case))
    if OURS in samples:
        ratios = {name: ratio(values, samples[OURS]) for name, values in samples.items()}
        others = [one.name for one in contenders if isinstance(one, Checkout) and one.name != OURS]
        record.checkouts = {name: ratios[name] for name in others if name in ratios}
        record.least = {name: ratios[name] for name, _ in case.least if name in ratios}
        if rivals := [name for name in case.against if name in samples]:
            record.rival = min(rivals, key=lambda name: statistics.median(samples[name]))
            record.ratio = ratios[record.rival]
    return record


def measure_all(
    cases: Sequence[Case],
    peers: Sequence[str] | None,
    effort: Effort,
    against: Sequence[Path] = (),
    workers: int = 0,
    limit: float | None = None,
    on_progress: Progress = silent,
    on_record: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Measure cases beside their rivals and `peers` (None: the default ones). A list of rivals other than SDPA alone gives way to
    `peers`. With other checkouts `against` it, tilewise runs in a process of its own like them; `workers` processes compile all
    kernels first; after `limit` seconds no case is begun; `on_record` hears of each case as it ends."""
    begin = time.monotonic()
    for device in {case.device for case in cases}:
        require_device(device)
    if against and any(case.cache for case in cases):
        raise ArgumentError("against: cases over a cache run in this process alone, not in another checkout's")
    sources = {f"checkout:{path.resolve().name}": source_folder(path) for path in against}
    if sources:
        sources = {OURS: OWN_SOURCE, **sources}
    names = {}
    for case in cases:
        rivals = case.rivals if not peers or case.against == Case.against else ()
        names[case.name] = list(dict.fromkeys([OURS, *rivals, *(peers or default_peers(case)), *sources]))
    if workers:
        # cases of one length first: those that follow each other have kernels of their own
        ordered = sorted(cases, key=lambda case: -case.seqlen)
        jobs = [(case, name, sources.get(name)) for case in ordered for name in names[case.name]]
        jobs = [job for job in jobs if not job[0].cache]  # their memory is large, and their kernels are few
        jobs = [job for job in jobs if job[1] in (*sources, *COMPILED) or job[1].startswith(OURS)]
        compile_ahead(jobs, workers, lambda what: on_progress(what, 0.0))
    records = []
    with ExitStack() as stack:
        checkouts = {name: stack.enter_context(Checkout(name, source)) for name, source in sources.items()}
        for number, case in enumerate(cases):
            if limit is not None and time.monotonic() - begin > limit:
                break

            def tell(what: str, done: float, number: int = number) -> None:
                on_progress(what, (number + done) / len(cases))

            contenders = [checkouts.get(name) or contender(name) for name in names[case.name]]
            records.append(measure(case, contenders, effort, tell))
            on_record(records[-1])
    caches.forget_pools()
    return records


def checkout_means(records: Iterable[Record]) -> list[tuple[str, float, float]]:
    """Other checkouts, the geometric mean of our speed in theirs, and the lowest."""
    ratios: dict[str, list[float]] = {}
    for record in records:
        for name, spread in record.checkouts.items():
            ratios.setdefault(name, []).append(spread.p50)
    return [(name, statistics.geometric_mean(values), min(values)) for name, values in ratios.items()]


class Mean(NamedTuple):
    """The geometric mean of the ratios of a group of cases; None if one of them has no ratio."""

    group: str
    ratio: float | None
    floor: float
    passed: bool


def geometric_means(records: Iterable[Record], floors: dict[str, float]) -> list[Mean]:
    """For each group that has cases among the records."""
    ratios: dict[str, list[float | None]] = {}
    for record in records:
        if record.case.group in floors:
            ratios.setdefault(record.case.group, []).append(record.ratio.p50 if record.ratio else None)
    found = []
    for group, values in ratios.items():
        known = [value for value in values if value is not None]
        mean, floor = statistics.geometric_mean(known) if len(known) == len(values) else None, floors[group]
        found.append(Mean(group, mean, floor, mean is not None and mean >= floor))
    return found
