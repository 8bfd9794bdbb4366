"""Which backend serves a problem, and why not the others."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from typing import NamedTuple

import torch

from tilewise.backends.base import Backend, Inputs, Verdict
from tilewise.backends.plans import REGISTRY as REGISTRY
from tilewise.backends.plans import VARIES
from tilewise.backends.plans import Entry as Entry
from tilewise.backends.plans import check_name as check_name
from tilewise.errors import ArgumentError, BackendError, KernelError
from tilewise.problem import Problem

_present_devices: set[str] = set()
_writers: dict[tuple[str, str, Entry | None, int], Backend | None] = {}
_joiners: dict[tuple[str, str, Entry | None, int], Backend | None] = {}


def registry_key(name: str) -> tuple[str, Entry | None, int]:
    """What a cached choice depends on: the name asked for, its entry now, and how many entries there are."""
    return name, REGISTRY.get(name), len(REGISTRY)


class Selection(NamedTuple):
    """The backend chosen and every backend's verdict; the verdicts of those never asked are absent."""

    backend: Backend
    verdicts: dict[str, Verdict]


def register(name: str, entry: Entry, *, first: bool = False) -> None:
    """Add a backend of your own; `first` puts it before all others."""
    if name in REGISTRY:
        raise ArgumentError(f"backend {name!r} is registered already; choose another name")
    rest = dict(REGISTRY)
    REGISTRY.clear()
    REGISTRY.update({name: entry, **rest} if first else {**rest, name: entry})


def get(name: str) -> Backend:
    """The backend of that name, imported now."""
    check_name(name)
    return _load(REGISTRY[name].module)


@cache
def _load(module: str) -> Backend:
    backend: Backend = importlib.import_module(module).backend
    return backend


def usable(name: str, device: str) -> Verdict:
    """Can the backend run here at all?"""
    entry = REGISTRY[name]
    if device not in entry.devices:
        return Verdict(False, (f"runs on {' and '.join(entry.devices)}; the tensors are on {device}",))
    if not _present(device):
        return Verdict(False, ("torch finds no GPU here",))
    try:
        return get(name).usable(device)
    except ImportError as error:
        return Verdict(False, (f"cannot be imported: {error}",))


def _present(device: str) -> bool:
    """Is there such a device? One that was there is not asked for again."""
    if device not in _present_devices and (device != "cuda" or torch.cuda.is_available()):
        _present_devices.add(device)
    return device in _present_devices


def judge(
    name: str, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False, derivative: str = ""
) -> Verdict:
    """Would the backend serve this problem, asked by name? `derivative` is one of DERIVATIVES, for which it needs a backward."""
    verdict = usable(name, problem.device)
    failure = problem.memory.get(("failure", name, derivative or backward))
    if verdict.ok and failure is not None:
        return Verdict(False, (failure,))
    if not verdict.ok:
        return verdict
    backend = get(name)
    if problem.invariant and not backend.invariant:
        return Verdict(False, (VARIES,))
    verdict = backend.supports(problem, inputs, backward=backward or bool(derivative))
    return backend.derives(problem, inputs, derivative=derivative) if derivative and verdict.ok else verdict


def pages_backend(problem: Problem, name: str = "auto") -> Backend | None:
    """The first backend that reads pages and serves the problem; None where their tokens have to be gathered for it."""
    check_name(name, "auto")
    for candidate in REGISTRY if name == "auto" else (name,):
        if usable(candidate, problem.device).ok and get(candidate).reads_pages and judge(candidate, problem).ok:
            return get(candidate)
    return None


def pages_writer(device: str, name: str = "auto") -> Backend | None:
    """The first backend that writes pages on a device; None where torch does it."""
    key = device, *registry_key(name)
    if key not in _writers:
        candidates = (get(one) for one in (REGISTRY if name == "auto" else (name,)) if usable(one, device).ok)
        _writers[key] = next((one for one in candidates if one.writes_pages), None)
    return _writers[key]


def parts_joiner(device: str, name: str = "auto") -> Backend | None:
    """The first backend that merges what several launches over pages computed on a device; None where torch does it."""
    key = device, *registry_key(name)
    if key not in _joiners:
        candidates = (get(one) for one in (REGISTRY if name == "auto" else (name,)) if usable(one, device).ok)
        _joiners[key] = next((one for one in candidates if one.joins_parts), None)
    return _joiners[key]


def next_backend(
    failed: Backend,
    error: KernelError,
    problem: Problem,
    inputs: Inputs,
    name: str,
    *,
    backward: bool = False,
    derivative: str = "",
) -> Backend:
    """The next backend after one whose kernel could not be made or started; a backend asked for by name has none."""
    if name != "auto":
        raise error
    problem.memory["failure", failed.name, derivative or backward] = str(error)
    following = select(problem, inputs, backward=backward, derivative=derivative).backend
    warnings.warn(f"{error}; {following.name} serves this call instead", RuntimeWarning, stacklevel=2)
    return following


def select(
    problem: Problem,
    inputs: Inputs | None = None,
    name: str = "auto",
    *,
    backward: bool = False,
    derivative: str = "",
) -> Selection:
    """The first backend in order that can and would; an explicit name never falls back."""
    if name != "auto":
        get(name)
        verdict = judge(name, problem, inputs, backward=backward, derivative=derivative)
        if not verdict.ok:
            raise BackendError(
                f"backend {name!r} cannot serve this call: {'; '.join(verdict.reasons)}. Use backend='auto' to take one that can",
                {name: verdict.reasons},
            )
        return Selection(get(name), {name: verdict})
    verdicts: dict[str, Verdict] = {}
    for candidate in REGISTRY:
        verdict = judge(candidate, problem, inputs, backward=backward, derivative=derivative)
        if verdict.ok:
            reason = get(candidate).declines(problem, inputs, backward=backward or bool(derivative))
            if reason is None:
                return Selection(get(candidate), {**verdicts, candidate: verdict})
            verdict = Verdict(False, (reason,))
        verdicts[candidate] = verdict
    lines = "".join(f"\n  {candidate}: {'; '.join(v.reasons)}" for candidate, v in verdicts.items())
    raise BackendError(f"no backend serves this call:{lines}", {n: v.reasons for n, v in verdicts.items()})
