"""From a Problem to a launch: the plan of a shape is made once, a call only allocates, describes its tensors and goes."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, empty_lse, empty_out
from tilewise.backends.gpu.launch import Descriptor
from tilewise.backends.hopper.compile import compile_for
from tilewise.backends.hopper.config import Config, tile_for
from tilewise.backends.hopper.intervals import Form, form_of, on_device, present
from tilewise.backends.hopper.structs import Arguments, Divisor, Rows
from tilewise.problem import Problem

L2_BYTES = 24 << 20
"""Of the L2 cache (50 MiB on H100 and H200) for the keys and values of heads that are walked together."""
LOG2E = 1.4426950408889634


class Plan(NamedTuple):
    """All of a launch that does not depend on the call's tensors."""

    kernel: Any
    config: Config
    arguments: Arguments  # its tensors are still to come
    programs: int


_plans: dict[tuple[Any, ...], Plan] = {}
_PLANS_LIMIT = 4096


def run_forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse of a supported problem, on the current stream."""
    return launch(problem, inputs, plan_for(problem, inputs.q.device))


def launch(problem: Problem, inputs: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
    device = inputs.q.device
    out, lse = empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q)
    config, a = plan.config, plan.arguments
    terms = a.terms
    if terms and problem.program.tensors:
        form = form_of(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
        assert isinstance(form, Form)
        terms = tuple(on_device(term, problem.batch, device) for term in form.terms)
    a = a._replace(lse_ptr=lse, terms=terms)
    if problem.varlen:
        rows = Rows(out, out.stride(1), out.stride(2), problem.head_dim_v)
        a = a._replace(cu_q=inputs.cu_q, cu_k=inputs.cu_k, out=rows)
    plan.kernel[(plan.programs, 1, 1)](
        Descriptor(inputs.q, 64, config.BLOCK_D),
        Descriptor(inputs.k, config.BLOCK_N, config.BLOCK_D),
        Descriptor(inputs.v, config.BLOCK_N, config.BLOCK_DV),
        Descriptor(out, 64, config.BLOCK_DV),
        a,
        config,
    )
    return out, lse


def plan_for(problem: Problem, device: torch.device) -> Plan:
    program = problem.program
    key = (
        program.structure, program.ints, problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k,
        problem.head_dim, problem.head_dim_v, problem.dtype, problem.scale, problem.softcap, problem.varlen, device,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _PLANS_LIMIT:
            _plans.clear()
        plan = _plans[key] = make_plan(problem, multiprocessors(device.index or 0), kernel_for)
    return plan


def make_plan(problem: Problem, processors: int, compile_: Any, tile: Config | None = None) -> Plan:
    """The plan on a GPU with so many multiprocessors; `compile_(dtype, arguments, config)` gives the kernel, `tile` overrides
    the table's."""
    form = form_of(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
    assert isinstance(form, Form), "the backend has said no to this problem"
    config = tile or tile_for(problem.head_dim, problem.head_dim_v, problem.seqlen_q, form.left or problem.varlen)
    config = config._replace(
        TERMS=len(form.terms),
        BAND=form.band,
        LEFT=form.left,
        VARLEN=problem.varlen,
        BOTTOM=form.bottom,
        SCORES="softcap" if problem.softcap > 0 else "fold" if problem.scale > 0 else "scale",
    )
    if problem.varlen:
        # what sequences of any lengths need at most: see find_sequence
        blocks, heads, cluster = problem.seqlen_q // config.BLOCK_M + problem.batch, problem.heads, 1
    else:
        blocks, heads = -(-problem.seqlen_q // config.BLOCK_M), problem.batch * problem.heads
        cluster = heads_together(problem, config)
    total = blocks * heads
    programs = min(total, processors)
    a = Arguments(
        lse_ptr=None,
        cu_q=True if problem.varlen else None,
        cu_k=True if problem.varlen else None,
        out=Rows(None, 0, 0, 0) if problem.varlen else None,
        terms=tuple(present(term) for term in form.terms),
        heads=Divisor.of(problem.heads),
        group=Divisor.of(problem.group),
        blocks=Divisor.of(cluster * blocks),
        cluster=Divisor.of(cluster),
        batch=problem.batch,
        len_q=problem.seqlen_q,
        len_k=problem.seqlen_k,
        last_q=problem.seqlen_q - 1,
        last_block=blocks - 1,
        total=total,
        programs=programs,
        rounds=total // programs,
        unit=(problem.softcap or problem.scale) * LOG2E,
        slope=problem.scale / problem.softcap if problem.softcap else 0.0,
    )
    return Plan(compile_(problem.dtype, a, config), config, a, programs)


def heads_together(problem: Problem, config: Config) -> int:
    """How many heads are walked side by side: one, unless rows differ in length; then what the L2 cache holds.

    It divides the number of heads, and where it can it is whole groups of heads that share their keys.
    """
    heads = problem.batch * problem.heads
    if not config.BAND:
        return 1
    most = max(1, L2_BYTES // (2 * problem.seqlen_k * (config.BLOCK_D + config.BLOCK_DV))) * problem.group
    return max(n for n in range(1, min(most, heads) + 1) if heads % n == 0)


@cache
def multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def pointers(a: Arguments) -> tuple[bool, ...]:
    """Which of the optional tensors are there."""
    return (a.cu_q is not None, *(x is not None for term in a.terms for x in term[4:]))


_kernels: dict[tuple[Any, ...], Any] = {}


def kernel_for(dtype: str, a: Arguments, config: Config) -> Any:
    """The compiled kernel, one for each config and device."""
    from triton.runtime import driver

    key = (dtype, pointers(a), config, driver.active.get_current_device())
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = compile_for(driver.active.get_current_target(), dtype, a, config)
    return kernel
