"""The Hopper backend: what it can do, and why not the rest."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from tilewise.backends.base import Backend, BackwardInputs, Grads, Inputs, Verdict
from tilewise.backends.gpu.launch import describable, interpreting, on_device
from tilewise.backends.hopper.backward.launch import run_backward
from tilewise.backends.hopper.config import WIDTHS
from tilewise.backends.hopper.intervals import interval_mask
from tilewise.backends.hopper.launch import run_forward
from tilewise.backends.verdict import no_tiles
from tilewise.problem import Problem

DTYPES = ("float16", "bfloat16")


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
        absent = {
            "bias": problem.bias is not None,
            "alibi": problem.alibi,
            "sinks": problem.sinks,
            "dropout": problem.dropout_p > 0,
            "precision='compensated'": problem.precision == "compensated",
        }
        mask = interval_mask(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
        return Verdict.of(
            *self.usable(problem.device).reasons,
            None if problem.dtype in DTYPES else f"dtype {problem.dtype} is not among {', '.join(DTYPES)}",
            *(f"{name} is not served here" for name, asked in absent.items() if asked),
            *(dim_reason(name, getattr(problem, name)) for name in ("head_dim", "head_dim_v")),
            mask if isinstance(mask, str) else None,
            no_tiles("hopper", problem.tile, "yet"),
            *(() if inputs is None else (layout_reason(name, getattr(inputs, name)) for name in "qkv")),
        )

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        if problem.decodes:
            rows = problem.seqlen_q * problem.group
            return f"{rows} rows would leave most of a tile empty; split keys serve so few queries better"
        return None

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return on_device(inputs.q.device, run_forward, problem, inputs)

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        return on_device(inputs.q.device, run_backward, problem, inputs, given)


def dim_reason(name: str, dim: int) -> str | None:
    if dim > WIDTHS[-1]:
        return f"{name} {dim} is over {WIDTHS[-1]}"
    return f"{name} {dim} is not a multiple of 8" if dim % 8 else None


def layout_reason(name: str, x: Tensor) -> str | None:
    if describable(x):
        return None
    return f"{name}: address and strides must be multiples of 16 bytes, the last stride 1 and none 0; pass {name}.contiguous()"


backend = Hopper()
