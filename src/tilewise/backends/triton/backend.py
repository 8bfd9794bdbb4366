"""The portable GPU backend: what it can do, and the sequence of its kernels."""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.metadata import version

import torch
from torch import Tensor

from tilewise.backends.base import Backend, BackwardInputs, Grads, Inputs, Verdict, empty_lse, empty_out
from tilewise.backends.gpu.launch import interpreting, on_device
from tilewise.backends.triton.run import run_backward, run_forward
from tilewise.backends.verdict import no_tiles
from tilewise.problem import WIDE, Problem

DTYPES = ("float16", "bfloat16", "float32")


class Triton(Backend):
    """See the package's text."""

    name = "triton"

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
        return Verdict.of(
            *self.usable(problem.device).reasons,
            None if problem.dtype in DTYPES else f"dtype {problem.dtype} is not among {', '.join(DTYPES)}",
            f"precision={problem.precision!r} is served by cpu and tiled; kernels here sum in float32"
            if problem.precision in WIDE
            else None,
            no_tiles("triton", problem.tile, "yet"),
        )

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        return "the interpreter is for tests" if interpreting() else None

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, lse = empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q)
        on_device(inputs.q.device, run_forward, problem, inputs, out, lse)
        return out, lse

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        return on_device(inputs.q.device, run_backward, problem, inputs, given)


@cache
def interpreter_reason() -> str | None:
    """Why Triton's interpreter does not work here."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of triton {version('triton')} does not work with numpy {version('numpy')}; it needs numpy < 2.4"
    return None


backend = Triton()
