"""From a Problem to the backward's launches: the plan of a shape is made once, a call only allocates, describes and goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Grads, Inputs
from tilewise.backends.gpu.compiled import Kernels
from tilewise.backends.gpu.launch import Address, Descriptor, describable
from tilewise.backends.hopper.backward.config import KeysConfig, QueriesConfig
from tilewise.backends.hopper.backward.plan import Plan, Step, make_plan
from tilewise.backends.hopper.compile import compile_kernel
from tilewise.backends.hopper.intervals import on_device
from tilewise.backends.hopper.launch import CALLS_LIMIT, PLANS_LIMIT, address, multiprocessors
from tilewise.backends.hopper.plan import mask_of
from tilewise.backends.hopper.repeat import repeatable
from tilewise.backends.hopper.structs import GradArguments, Plane, PrePostArguments, Rows, Term
from tilewise.problem import Problem


class Memory(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    scratch: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None


_plans: dict[tuple[Any, ...], Plan] = {}


def run_backward(problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
    """The gradients of a supported problem, on the current stream."""
    out, lse, dout, dlse, needs = given
    q, k, v = inputs[:3]
    plan = plan_for(problem, q.device, dlse is not None)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scratch = q.new_empty(plan.stats + plan.dq, dtype=torch.float32)
    cu_q, cu_k = (inputs.cu_q, inputs.cu_k) if problem.varlen else (None, None)
    launch(problem, Memory(q, k, v, out, lse, dout, dlse, dq, dk, dv, scratch, cu_q, cu_k), plan)
    return Grads(dq if needs.dq else None, dk if needs.dk else None, dv if needs.dv else None)


def launch(problem: Problem, memory: Memory, plan: Plan) -> None:
    terms: tuple[Term, ...] = ()
    if problem.program.tensors:
        terms = tuple(on_device(term, problem.batch, memory.q.device) for term in mask_of(problem).terms)
    stream = torch._C._cuda_getCurrentRawStream(memory.q.device.index)
    tensors = [x for x in memory if x is not None]
    held = [x.data_ptr() for term in terms for x in term[4:] if x is not None]
    key = (stream, *[x.data_ptr() for x in tensors], *[x.stride() for x in tensors], *held)
    calls = plan.calls.get(key)
    if calls is None:
        # gradients may arrive in any layout; copies have addresses of their own, so they are not looked for above
        tidy = readable(memory)
        calls = tuple(bind(step, plan, tidy, terms, stream) for step in plan.steps)
        if tidy is memory:
            if len(plan.calls) >= CALLS_LIMIT:
                plan.calls.clear()
            plan.calls[key] = calls
    for call in calls:
        call()


def readable(memory: Memory) -> Memory:
    """The same numbers where the kernels can read them."""
    out = memory.out if describable(memory.out) else memory.out.contiguous()
    dout = memory.dout if describable(memory.dout) else memory.dout.contiguous()
    dlse = memory.dlse if memory.dlse is None or memory.dlse.is_contiguous() else memory.dlse.contiguous()
    if out is memory.out and dout is memory.dout and dlse is memory.dlse:
        return memory
    return memory._replace(out=out, dout=dout, dlse=dlse)


def bind(step: Step, plan: Plan, memory: Memory, terms: tuple[Term, ...], stream: int) -> Callable[[], Any]:
    """A step over these tensors, of which only the addresses are kept."""
    stats = memory.scratch.data_ptr()
    dq = stats + 4 * plan.stats
    maps: tuple[Any, ...] = ()
    arguments: GradArguments | PrePostArguments
    if isinstance(step.arguments, PrePostArguments):
        arguments = step.arguments._replace(
            out=plane(memory.out),
            dout=plane(memory.dout),
            dq=plane(memory.dq),
            lse_ptr=memory.lse.data_ptr(),
            dlse_ptr=address(memory.dlse),
            stats_ptr=stats,
            dq_ptr=dq,
            cu_q=address(memory.cu_q),
        )
    else:
        own = terms or step.arguments.terms
        arguments = step.arguments._replace(
            cu_q=address(memory.cu_q),
            cu_k=address(memory.cu_k),
            order=address(step.arguments.order),
            terms=tuple(Term(*term[:4], *(address(x) for x in term[4:])) for term in own),
            stats_ptr=stats,
            dq_ptr=dq,
        )
        if memory.cu_k is not None:
            packed = {name: packed_rows(getattr(memory, name)) for name in ("dq", "dk", "dv")}
            arguments = arguments._replace(**packed)
        maps = descriptors(step.config, memory, stats, plan.stats)
    run = step.kernel.run  # loads the kernel, so it comes first
    head = (step.programs, 1, 1, stream, step.kernel.function, step.kernel.packed_metadata, None, None, None)
    return repeatable(run, (*head, *maps, arguments, step.config))


def descriptors(config: KeysConfig | QueriesConfig, memory: Memory, stats: int, length: int) -> tuple[Descriptor, ...]:
    """Tensor maps in the order of the kernels' arguments."""
    d, dv, queries = config.BLOCK_D, config.BLOCK_DV, isinstance(config, QueriesConfig)
    rows = 64 if queries else config.BLOCK_M
    maps = [
        Descriptor(memory.q, rows, d),
        Descriptor(memory.dout, rows, dv),
        Descriptor(memory.k, config.BLOCK_N, d),
        Descriptor(memory.v, config.BLOCK_N, dv),
    ]
    results = (
        [Descriptor(memory.dq, 64, d)] if queries else [Descriptor(memory.dk, 64, d), Descriptor(memory.dv, 64, dv)]
    )
    statistics = [] if queries else [vector(stats, length, 2 * rows)]
    return (*(m.at(m.base.data_ptr()) for m in maps), *statistics, *(m.at(m.base.data_ptr()) for m in results))


def vector(at: int, length: int, block: int) -> Descriptor:
    """A tensor map over a vector of fp32."""
    found = Descriptor.__new__(Descriptor)
    found.base = Address(at)
    found.shape, found.strides, found.block_shape = [length], [1], [block]
    found.padding, found.round_f32_to_tf32 = "zero", False
    return found


def plane(x: Tensor) -> Plane:
    b, h, rows = (0 if size == 1 else step for size, step in zip(x.shape[:3], x.stride()[:3], strict=True))
    return Plane(x.data_ptr(), b, h, rows, x.shape[3])


def packed_rows(x: Tensor) -> Rows:
    return Rows(x.data_ptr(), x.stride(1), x.stride(2), x.shape[3])


def plan_for(problem: Problem, device: torch.device, with_dlse: bool) -> Plan:
    program = problem.program
    key = (
        program.structure, program.ints, problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k,
        problem.head_dim, problem.head_dim_v, problem.dtype, problem.scale, problem.softcap, problem.varlen,
        problem.deterministic, device, with_dlse,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= PLANS_LIMIT:
            torch.cuda.synchronize(device)  # kernels on other streams may be reading their orders
            _plans.clear()
        plan = make_plan(problem, multiprocessors(device.index or 0), kernel_for, with_dlse)
        plan = _plans[key] = on_gpu(plan, device)
    return plan


def on_gpu(plan: Plan, device: torch.device) -> Plan:
    """The plan with its orders in device memory."""

    def moved(step: Step) -> Step:
        a = step.arguments
        if isinstance(a, PrePostArguments) or a.order is None:
            return step
        return step._replace(arguments=a._replace(order=a.order.to(device)))

    return plan._replace(steps=tuple(moved(step) for step in plan.steps))


_kernels = Kernels("hopper")


def kernel_for(name: str, dtype: str, arguments: Any, config: KeysConfig | QueriesConfig) -> Any:
    """The compiled kernel, one for each config, kind of arguments and device."""
    from triton.runtime import driver

    absent = tuple(part is None for part in _flat(arguments))
    key = (name, dtype, absent, config, driver.active.get_current_device())
    target = driver.active.get_current_target()
    return _kernels.get(key, name, lambda: compile_kernel(target, name, dtype, arguments, config))


def _flat(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _flat(part)] if isinstance(value, tuple) else [value]
