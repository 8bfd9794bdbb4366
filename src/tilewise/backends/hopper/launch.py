"""From a Problem to a launch: the plan of a shape is made once, a call only allocates, describes its tensors and goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, empty_lse, empty_out
from tilewise.backends.gpu.compiled import Kernels
from tilewise.backends.gpu.launch import Descriptor
from tilewise.backends.hopper.compile import compile_kernel
from tilewise.backends.hopper.config import Config
from tilewise.backends.hopper.intervals import on_device
from tilewise.backends.hopper.plan import Plan, make_plan, mask_of
from tilewise.backends.hopper.repeat import repeatable
from tilewise.backends.hopper.structs import Arguments, Rows, Term
from tilewise.problem import Problem

_plans: dict[tuple[Any, ...], Plan] = {}
PLANS_LIMIT = 1024
CALLS_LIMIT = 256


def run_forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse of a supported problem, on the current stream."""
    return launch(problem, inputs, plan_for(problem, inputs.q.device))


def launch(problem: Problem, inputs: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
    q, k, v = inputs[:3]
    out, lse = empty_out(q, problem.head_dim_v), empty_lse(q)
    terms = plan.arguments.terms
    if terms and problem.program.tensors:
        terms = tuple(on_device(term, problem.batch, q.device) for term in mask_of(problem).terms)
    cu_q, cu_k = (inputs.cu_q, inputs.cu_k) if problem.varlen else (None, None)
    tensors = (q, k, v, out, lse, cu_q, cu_k, *(x for term in terms for x in term[4:] if x is not None))
    stream = torch._C._cuda_getCurrentRawStream(q.device.index)
    addresses = [x.data_ptr() for x in tensors if x is not None]
    key = (stream, q.stride(), k.stride(), v.stride(), *addresses)
    call = plan.calls.get(key)
    if call is None:
        if len(plan.calls) >= CALLS_LIMIT:
            plan.calls.clear()
        call = plan.calls[key] = prepare(plan, stream, tensors, terms)
    call()
    return out, lse


def prepare(
    plan: Plan, stream: int, tensors: tuple[Tensor | None, ...], terms: tuple[Term, ...]
) -> Callable[[], Any]:
    """The launch over these tensors (q, k, v, out, lse, cu_q, cu_k, ...), of which only the addresses are kept."""
    q, k, v, out, lse, cu_q, cu_k = tensors[:7]
    assert q is not None and k is not None and v is not None and out is not None
    config = plan.config
    order = plan.arguments.order
    a = plan.arguments._replace(
        lse_ptr=address(lse),
        cu_q=address(cu_q),
        cu_k=address(cu_k),
        order=address(order),
        terms=tuple(Term(*term[:4], *(address(x) for x in term[4:])) for term in terms),
    )
    if cu_q is not None:
        a = a._replace(out=Rows(out.data_ptr(), out.stride(1), out.stride(2), out.shape[3]))
    maps = (
        Descriptor(q, 64, config.BLOCK_D),
        Descriptor(k, config.BLOCK_N, config.BLOCK_D),
        Descriptor(v, config.BLOCK_N, config.BLOCK_DV),
        Descriptor(out, 64, config.O_COLUMNS),
    )
    run = plan.kernel.run  # loads the kernel, so it comes first
    head = (plan.programs, 1, 1, stream, plan.kernel.function, plan.kernel.packed_metadata, None, None, None)
    args = (*head, *(m.at(m.base.data_ptr()) for m in maps), a, config)
    return repeatable(run, args)


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def plan_for(problem: Problem, device: torch.device) -> Plan:
    program = problem.program
    key = (
        program.structure, program.ints, problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k,
        problem.head_dim, problem.head_dim_v, problem.dtype, problem.scale, problem.softcap, problem.varlen, device,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= PLANS_LIMIT:
            torch.cuda.synchronize(device)  # kernels on other streams may be reading their orders
            _plans.clear()
        plan = make_plan(problem, multiprocessors(device.index or 0), kernel_for)
        plan = _plans[key] = on_gpu(plan, device)
    return plan


def on_gpu(plan: Plan, device: torch.device) -> Plan:
    """The plan with its order in device memory."""
    order = plan.arguments.order
    return plan if order is None else plan._replace(arguments=plan.arguments._replace(order=order.to(device)))


@cache
def multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def pointers(a: Arguments) -> tuple[bool, ...]:
    """Which of the optional tensors are there."""
    return (a.cu_q is not None, *(x is not None for term in a.terms for x in term[4:]))


_kernels = Kernels("hopper")


def kernel_for(dtype: str, a: Arguments, config: Config) -> Any:
    """The compiled kernel, one for each config and device."""
    from triton.runtime import driver

    key = (dtype, pointers(a), config, driver.active.get_current_device())
    target = driver.active.get_current_target()
    return _kernels.get(key, "forward_kernel", lambda: compile_kernel(target, "forward_kernel", dtype, a, config))
