"""On a GPU, the backward's kernels compile in the background while the forward runs.

When a problem is met for the first time and a gradient is wanted, the kernels of its backward are given to a thread after the
forward was launched. The backward waits for those that are not ready; an error of the compiler is raised there. A child of fork
compiles for itself. TILEWISE_AHEAD=0 turns it off.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.backends.base import BackwardInputs, Inputs, Needs
from tilewise.errors import TilewiseError
from tilewise.problem import Problem

SWITCH = "TILEWISE_AHEAD"
LIMIT = 4096
_seen: set[Any] = set()


def compile_backward(
    problem: Problem, inputs: Inputs, results: tuple[Tensor, Tensor], backend: str, needs: Needs
) -> None:
    """Have the kernels of a problem's backward compiled, unless that was asked for before."""
    problem.memory["ahead"] = True
    if os.environ.get(SWITCH) == "0" or (inputs.q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    from tilewise.backends.gpu.record import problem_key  # a CPU needs none of it

    key = (problem_key(problem), inputs.q.device, backend, needs)
    if key in _seen:
        return
    if len(_seen) >= LIMIT:
        _seen.clear()
    _seen.add(key)
    out, lse = results
    try:
        chosen = dispatch.select(problem, inputs, backend, backward=True).backend
        for job in chosen.missing_kernels(problem, inputs, BackwardInputs(out, lse, out, None, needs)):
            if job.ahead is not None:
                job.ahead()
    except (TilewiseError, RuntimeError):  # the backward meets it again, and raises it
        return
