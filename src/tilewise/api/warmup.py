"""`warmup`: compile the kernels that problems or a model need before the first call does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewise import dispatch
from tilewise.api.compile_pool import compile_in_processes
from tilewise.api.model_config import problems_of_config
from tilewise.backends.base import BackwardInputs, CompileJob, Inputs, Needs, empty_lse, empty_out
from tilewise.display import Shown, Table, format_seconds
from tilewise.errors import ArgumentError, ArgumentTypeError, DeviceError, KernelError
from tilewise.problem import Problem

MOST_PROCESSES = 8
Progress = Callable[[str, float], None]
"""Takes what is being done, and the part that is done."""


class Need(NamedTuple):
    """A problem, and whether its gradients are wanted."""

    problem: Problem
    backward: bool


@dataclass(frozen=True)
class Warmed:
    """A kernel that was compiled; `error` is why it was not."""

    name: str
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class WarmupReport(Shown):
    """What a warmup has compiled."""

    device: str
    problems: int
    kernels: tuple[Warmed, ...]
    seconds: float
    processes: int

    @property
    def ok(self) -> bool:
        """Was everything compiled?"""
        return all(one.error is None for one in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def content(self) -> Table:
        rows = [[one.name, format_seconds(one.seconds), one.error or ""] for one in self.kernels]
        count = len(self.kernels)
        title = f"{count} kernel{'s' * (count != 1)} for {self.problems} problem{'s' * (self.problems != 1)} on {self.device}, "
        title += f"{format_seconds(self.seconds)} with {self.processes} process{'es' * (self.processes != 1)}"
        return Table(title, ("kernel", "compiled in", "error"), rows, wraps=(2,))


def warmup(
    problems_or_config: Any,
    *,
    device: str | torch.device | None = None,
    backward: bool = True,
    processes: int | None = None,
) -> WarmupReport:
    """Compile what calls will need, in several processes at once, so that no first call waits for a compiler.

    Kernels depend on dtype, head dims, masks and features, hardly on lengths. They are kept on disk (those of GPUs in Triton's
    cache), so that later processes find them too. What is compiled already is not compiled again.

    problems_or_config: a Problem, or several; or a model's configuration: a dict, an object with `to_dict` such as transformers',
        or the path of a JSON file. Of a model, prompts of 4,096 tokens (or as many as it takes) and single new tokens are
        prepared, for each kind of its layers.
    device: "cuda", "cuda:1", "cpu" or a torch.device; None: the GPU if there is one.
    backward: also what gradients need; of a model, those of prompts.
    processes: how many compile at once; None: up to 8, as there are processors and kernels. 1 compiles in this process.

    Returns a report that prints itself: `kernels`, each with its `name`, `seconds` and, if it could not be compiled, `error`;
    `ok`, `seconds`, `problems`, `device` and `processes`.

    >>> tw.warmup(tw.Problem.of(heads=32, kv_heads=8, seqlen=4096, head_dim=128, mask=tw.causal()))
    >>> print(tw.warmup("config.json", backward=False))
    """
    return warm(needs_of(problems_or_config, backward), device, processes)


def needs_of(problems_or_config: Any, backward: bool, seqlen: int | None = None) -> list[Need]:
    """What is to be compiled for problems, or for the layers of a model at prompts of `seqlen` tokens."""
    given = problems_or_config
    if isinstance(given, Problem):
        return [Need(given, backward)]
    if isinstance(given, (str, os.PathLike, Mapping)) or hasattr(given, "to_dict"):
        config = Path(given) if isinstance(given, (str, os.PathLike)) else given
        return [Need(one, backward and one.seqlen_q > 1) for one in problems_of_config(config, seqlen)]
    problems = list(given) if isinstance(given, Iterable) else [given]
    if not problems or not all(isinstance(one, Problem) for one in problems):
        wrong = next((type(one).__name__ for one in problems if not isinstance(one, Problem)), "nothing")
        raise ArgumentTypeError(
            f"problems_or_config: got {wrong}, need a Problem, several of them, or a model's configuration: a dict, "
            "a path of a JSON file or an object with to_dict()"
        )
    return [Need(one, backward) for one in problems]


def warm(
    needs: list[Need], device: str | torch.device | None, processes: int | None, on_progress: Progress = lambda what, done: None
) -> WarmupReport:
    """Compile what is needed."""
    start, where = time.perf_counter(), _device(device)
    if processes is not None and (isinstance(processes, bool) or not isinstance(processes, int) or processes < 1):
        raise ArgumentError(f"processes: got {processes!r}, need a number from 1 on, or None")
    jobs = list({job.name + repr(job.make): job for need in needs for job in _jobs(need, where)}.values())
    usual = min(MOST_PROCESSES, os.cpu_count() or 1)
    processes = max(1, min(usual if processes is None else processes, len(jobs)))
    kernels = []
    if processes > 1:
        found = compile_in_processes([job.make for job in jobs], processes, _counted(jobs, on_progress))
        for job, (seconds, error) in zip(jobs, found, strict=True):
            kernels.append(Warmed(job.name, seconds, error) if error else _adopt(job, seconds))
    else:
        for i, job in enumerate(jobs):
            on_progress(job.name, i / len(jobs))
            kernels.append(_adopt(job))
    return WarmupReport(str(where), len(needs), tuple(kernels), time.perf_counter() - start, processes)


def _counted(jobs: list[CompileJob], on_progress: Progress) -> Callable[[int, int], None]:
    return lambda i, done: on_progress(jobs[i].name, done / len(jobs))


def _adopt(job: CompileJob, seconds: float = 0.0) -> Warmed:
    """Load a kernel into this process, compiled here if it is not yet."""
    start = time.perf_counter()
    try:
        job.adopt()
    except KernelError as error:
        return Warmed(job.name, seconds + time.perf_counter() - start, str(error))
    return Warmed(job.name, seconds + time.perf_counter() - start)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"device: got {device!r}, need 'cuda', 'cpu' or a torch.device") from error
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not torch.cuda.is_available()):
        raise DeviceError(f"device: got {device!r}, and torch finds none here; kernels are compiled for the machine at hand")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _jobs(need: Need, device: torch.device) -> Iterator[CompileJob]:
    """What the backends that serve a problem would compile."""
    problem = replace(need.problem, device=device.type, needs_grad=need.backward)
    if 0 in (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k):
        return
    inputs = stand_ins(problem, device)
    yield from dispatch.select(problem, inputs).backend.missing_kernels(problem, inputs)
    if need.backward:
        out, lse = empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q, problem.precision)
        chosen = dispatch.select(problem, inputs, backward=True).backend
        for dbias in (False, True) if problem.bias is not None else (False,):  # with its gradient other kernels may run
            wanted = Needs(dbias=dbias, dsinks=problem.sinks)
            yield from chosen.missing_kernels(problem, inputs, BackwardInputs(out, lse, out, None, wanted))


def stand_ins(problem: Problem, device: torch.device) -> Inputs:
    """Tensors like those of a call, with nothing in them."""
    dtype = getattr(torch, problem.dtype)
    batch = 1 if problem.varlen else problem.batch

    def empty(heads: int, tokens: int, dim: int) -> torch.Tensor:
        if problem.interleaved:
            return torch.empty((batch, tokens, heads, dim), dtype=dtype, device=device).transpose(1, 2)
        return torch.empty((batch, heads, tokens, dim), dtype=dtype, device=device)

    def lengths(tokens: int) -> torch.Tensor | None:
        ends = [tokens * i // max(1, problem.batch) for i in range(problem.batch + 1)]
        return torch.tensor(ends, dtype=torch.int32, device=device) if problem.varlen else None

    wide = torch.float64 if problem.arithmetic == "float64" else torch.float32
    return Inputs(
        empty(problem.heads, problem.seqlen_q, problem.head_dim),
        empty(problem.kv_heads, problem.seqlen_k, problem.head_dim),
        empty(problem.kv_heads, problem.seqlen_k, problem.head_dim_v),
        bias=None if problem.bias is None else torch.empty(problem.bias, dtype=dtype, device=device),
        alibi=torch.zeros((1, problem.heads), dtype=wide, device=device) if problem.alibi else None,
        sinks=torch.zeros(problem.heads, dtype=dtype, device=device) if problem.sinks else None,
        seed=torch.zeros((), dtype=torch.int64, device=device) if problem.dropout_p else None,
        cu_q=lengths(problem.seqlen_q),
        cu_k=lengths(problem.seqlen_k),
    )
