"""The portable GPU backend: what it can do, and the sequence of its kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.backends.base import (
    Backend,
    BackwardInputs,
    CompileJob,
    Direction,
    EntropyCotangent,
    Grads,
    Inputs,
    Jvp,
    PagedLaunch,
    PagedLauncher,
    Statistics,
    Tangents,
    Verdict,
    empty_lse,
    empty_out,
)
from tilewise.backends.gpu.compiled import missing
from tilewise.backends.gpu.launch import interpreting, on_device
from tilewise.backends.triton import plan
from tilewise.backends.triton.derive import run_double_backward, run_jvp
from tilewise.backends.triton.run import run_backward, run_forward, spec_of
from tilewise.backends.triton.statistics import run_entropy_backward, run_statistics
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.backends.pages import NewTokens, PagedPart, Pages
    from tilewise.hardware import DeviceSpec


class Triton(Backend):
    """See the package's text."""

    name = "triton"
    reads_pages = True
    writes_pages = True
    joins_parts = True
    invariant = plan.INVARIANT

    def usable(self, device: str) -> Verdict:
        if importlib.util.find_spec("triton") is None:
            return Verdict(False, ("triton is not installed; pip install triton",))
        if interpreting():
            return Verdict.of(
                None if device == "cpu" else f"TRITON_INTERPRET is set: runs on cpu tensors only, not on {device}",
                interpreter_reason(),
            )
        if device != "cuda":
            return Verdict(
                False, (f"runs on cuda (and, with TRITON_INTERPRET=1, in the interpreter on cpu); not on {device}",)
            )
        if not torch.cuda.is_available():
            return Verdict(False, ("torch finds no CUDA device",))
        if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
            major, minor = torch.cuda.get_device_capability()
            return Verdict(False, (f"needs compute capability 8.0 or newer, found {major}.{minor}",))
        return Verdict(True)

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        """What the plan says for this machine, and whether the kernels run here at all."""
        usable = self.usable(problem.device)
        if not usable.ok:
            return Verdict.of(*usable.reasons, *plan.obstacles(problem))
        device = torch.device(problem.device) if inputs is None else inputs.q.device
        return plan.supports(problem, spec_of(device), backward=backward)

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        return "the interpreter is for tests" if interpreting() else None

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, lse = empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q)
        on_device(inputs.q.device, run_forward, problem, inputs, out, lse)
        return out, lse

    def missing_kernels(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs | None = None
    ) -> list[CompileJob]:
        own = replace(problem)  # with a memory of its own: nothing that is made meanwhile is filled
        return missing(self.name, lambda: self.forward(own, inputs) if given is None else self.backward(own, inputs, given))

    def paged(self, problem: Problem, inputs: Inputs, pages: Pages) -> tuple[Tensor, Tensor]:
        from tilewise.backends.triton.paged import run_paged

        return on_device(inputs.q.device, run_paged, problem, inputs, pages)

    def paged_launcher(self, problem: Problem, inputs: Inputs, pages: Pages) -> PagedLauncher | None:
        from tilewise.backends.triton.paged import paged_launcher

        return paged_launcher(problem, inputs, pages) if type(self).paged is Triton.paged else None

    def paged_launches(self, problem: Problem, inputs: Inputs, pages: Pages, spec: DeviceSpec) -> list[PagedLaunch]:
        from tilewise.backends.triton.paged import paged_tiles

        return [PagedLaunch(problem, inputs, pages, paged_tiles(problem, pages, spec))]

    def join_parts(self, q: Tensor, parts: Sequence[PagedPart], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        from tilewise.backends.triton.joined import run_join

        return on_device(q.device, run_join, q, parts, sinks)

    def append(self, pages: Pages, new: NewTokens) -> Tensor | None:
        from tilewise.backends.triton.paged import run_append

        return on_device(pages.k.device, run_append, pages, new)

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        return on_device(inputs.q.device, run_backward, problem, inputs, given)

    def statistics(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Statistics]:
        return on_device(inputs.q.device, run_statistics, problem, inputs)

    def entropy_backward(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: EntropyCotangent
    ) -> Grads:
        return on_device(inputs.q.device, run_entropy_backward, problem, inputs, given, entropy)

    def derives(self, problem: Problem, inputs: Inputs | None = None, *, derivative: str) -> Verdict:
        device = torch.device(problem.device) if inputs is None else inputs.q.device
        return plan.derives(problem, spec_of(device), derivative=derivative)

    def jvp(self, problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
        return on_device(inputs.q.device, run_jvp, problem, inputs, tangents)

    def double_backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs, direction: Direction) -> Grads:
        return on_device(inputs.q.device, run_double_backward, problem, inputs, given, direction)


@cache
def interpreter_reason() -> str | None:
    """Why Triton's interpreter does not work here."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of triton {version('triton')} does not work with numpy {version('numpy')}; it needs numpy < 2.4"
    if triton == (3, 9):
        return f"the interpreter of triton {version('triton')} makes masks of numbers, and then refuses them; 3.7 and 3.8 do not"
    return None


backend = Triton()
