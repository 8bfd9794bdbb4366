"""The Hopper backend: what it can do, and why not the rest."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends.base import (
    Backend,
    BackwardInputs,
    CompileJob,
    Grads,
    Inputs,
    Jvp,
    Statistics,
    Tangents,
    Verdict,
)
from tilewise.backends.gpu.compiled import missing
from tilewise.backends.gpu.launch import describable, interpreting, on_device
from tilewise.backends.hopper import plan
from tilewise.backends.hopper.backward.launch import run_backward
from tilewise.backends.hopper.jvp.launch import run_jvp
from tilewise.backends.hopper.launch import run_forward, run_statistics
from tilewise.problem import Problem

FARTHEST = 2**31 // 256
"""How far apart two queries or keys of a bias may lie: no tile has as many as 256."""


class Hopper(Backend):
    """See the package's text."""

    name = "hopper"

    def usable(self, device: str) -> Verdict:
        if importlib.util.find_spec("triton") is None:
            return Verdict(False, ("triton is not installed; pip install triton",))
        if device != "cuda" or interpreting():
            return Verdict(False, (f"runs on cuda (Hopper) only, not on {device} or in the interpreter",))
        if torch.version.hip is not None or not torch.cuda.is_available():
            return Verdict(False, ("torch finds no CUDA device",))
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) != (9, 0):
            return Verdict(False, (f"needs compute capability 9.0, found {major}.{minor}",))
        return Verdict(True)

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        return Verdict.of(
            *self.usable(problem.device).reasons,
            *plan.obstacles(problem, backward),
            *(() if inputs is None else (layout_reason(name, getattr(inputs, name)) for name in "qkv")),
            None if inputs is None or inputs.bias is None else bias_reason(inputs.bias),
        )

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        return plan.declines(problem, backward=backward)

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return on_device(inputs.q.device, run_forward, problem, inputs)

    def forward_packed(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return self.forward(problem, inputs)  # lists, which would need views, are not served in a packed batch

    def statistics(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Statistics]:
        return on_device(inputs.q.device, run_statistics, problem, inputs)

    def missing_kernels(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs | None = None
    ) -> list[CompileJob]:
        own = replace(problem)  # with a memory of its own: nothing that is made meanwhile is filled
        return missing(self.name, lambda: self.forward(own, inputs) if given is None else self.backward(own, inputs, given))

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        return on_device(inputs.q.device, run_backward, problem, inputs, given)

    def backward_packed(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        return self.backward(problem, inputs, given)

    def derives(self, problem: Problem, inputs: Inputs | None = None, *, derivative: str) -> Verdict:
        return Verdict.of(*plan.derivative_obstacles(problem, derivative))

    def jvp(self, problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
        return on_device(inputs.q.device, run_jvp, problem, inputs, tangents)


def layout_reason(name: str, x: Tensor) -> str | None:
    if describable(x):
        return None
    return f"{name}: address and strides must be multiples of 16 bytes, the last stride 1 and none 0; pass {name}.contiguous()"


def bias_reason(x: Tensor) -> str | None:
    """Why the kernels cannot read a bias; they step over the queries and keys of a tile with 32 bits."""
    if x.dtype == torch.float64:
        return "bias: dtype float64 is not read here; pass bias.float()"
    far = any(size > 1 and step >= FARTHEST for size, step in zip(x.shape[2:], x.stride()[2:], strict=True))
    return "bias: its queries or keys lie too far apart; pass bias.contiguous()" if far else None


backend = Hopper()
