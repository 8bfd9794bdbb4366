"""From a Problem and tangents to a launch: the plan of a shape is made once, a call allocates and repeats recorded launches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, Jvp, Tangents, empty_lse, empty_out
from tilewise.backends.gpu.compiled import Kernels
from tilewise.backends.gpu.launch import Descriptor, describable
from tilewise.backends.gpu.record import Launch, recorder
from tilewise.backends.hopper.jvp.arguments import JvpPlan, make_plan
from tilewise.backends.hopper.jvp.choose import Moving
from tilewise.backends.hopper.jvp.compile import compile_jvp, tile_shapes
from tilewise.backends.hopper.launch import _leaves, device_terms, order_on, packed_rows, spec_of, tensors_of
from tilewise.backends.hopper.orders import CLUSTER_BYTES, heads_together
from tilewise.backends.hopper.packed_order import Lengths, packed_order
from tilewise.backends.hopper.structs import Term
from tilewise.problem import Problem

Tensors = tuple[Tensor | None, ...]


def run_jvp(problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
    """out, lse and their derivatives along tangents of q, k and v, on the current stream."""
    q, k, v = inputs[:3]
    moving = tuple(None if x is None else mappable(x) for x in tangents[:3])
    moves = Moving(*(x is not None for x in moving))
    strides = tuple(None if x is None else x.stride() for x in (q, k, v, *moving))
    key = ("hopper jvp", q.device, strides)
    recording = recorder.get(problem, key, q.device, partial(plan_on, problem, q.device, moves))
    out, lse = empty_out(q, problem.head_dim_v), empty_lse(q)
    out_t, lse_t = torch.empty_like(out), torch.empty_like(lse)
    cu_q, cu_k = (inputs.cu_q, inputs.cu_k) if problem.varlen else (None, None)
    tensors: Tensors = (q, k, v, *moving, out, out_t, lse, lse_t, cu_q, cu_k)
    terms: tuple[Term, ...] = ()
    if problem.program.tensors:
        terms = device_terms(problem, q)
        tensors += tensors_of(terms)
    plan = recording.plan
    ordered = {}
    if cu_q is not None and cu_k is not None:
        cluster = partial(heads_together, problem, plan.config, CLUSTER_BYTES[1] // 2)
        order = packed_order(problem, q, Lengths(cu_q, cu_k), plan.config, plan.arguments, False, cluster)
        ordered = order._asdict()
        tensors += order
    if not recording.repeat(tensors):
        recording.record(tensors, [launch_of(plan, tensors, terms, ordered)])
    return Jvp(out, lse, out_t, lse_t)


def mappable(x: Tensor) -> Tensor:
    """A tangent that a tensor map describes: itself, or a copy."""
    return x if describable(x) else x.clone(memory_format=torch.contiguous_format)


def launch_of(plan: JvpPlan, tensors: Tensors, terms: tuple[Term, ...], ordered: dict[str, Tensor]) -> Launch:
    """The kernel over these tensors; `terms` of a mask without tensors are the plan's, as is the order if none is given."""
    out, out_t, lse, lse_t, cu_q, cu_k = tensors[6:12]
    assert out is not None and out_t is not None
    a = plan.arguments._replace(
        lse_ptr=lse,
        lse_t_ptr=lse_t,
        cu_q=cu_q,
        cu_k=cu_k,
        **ordered,
        terms=terms or plan.arguments.terms,
        out=None if cu_q is None else packed_rows(out),
        out_t=None if cu_q is None else packed_rows(out_t),
    )
    boxes = zip(tensors[:8], tile_shapes(plan.config).values(), strict=True)
    maps = (None if x is None or box is None else Descriptor.of(x, *box) for x, box in boxes)
    return Launch(plan.kernel, plan.programs, (*maps, a), plan.config)


def plan_on(problem: Problem, device: torch.device, moving: Moving) -> JvpPlan:
    """The launch on a device, with its order in the device's memory."""
    plan = make_plan(problem, spec_of(device.index or 0), kernel_for, moving)
    return plan._replace(arguments=order_on(plan.arguments, device))


_kernels = Kernels("hopper")


def kernel_for(dtype: str, arguments: Any, config: Any) -> Any:
    """The compiled kernel, one for each config, device and choice of optional arguments."""
    from triton.runtime import driver

    absent = tuple(part is None for part in _leaves(arguments))
    key = (dtype, absent, config, driver.active.get_current_device())
    target = driver.active.get_current_target()
    return _kernels.get(key, "jvp_kernel", partial(compile_jvp, target, dtype, arguments, config))
