"""From a Problem to a launch: the plan of a shape is made once, a call allocates and repeats recorded launches."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, Statistics, empty_lse, empty_out, empty_packed, rank4_inputs, to_rank4
from tilewise.backends.gpu.compiled import Kernels
from tilewise.backends.gpu.kept import kept
from tilewise.backends.gpu.launch import Descriptor
from tilewise.backends.gpu.record import Launch, Recording, recorder
from tilewise.backends.gpu.structs import MaskArgs
from tilewise.backends.hopper.arguments import ForwardPlan, make_plan
from tilewise.backends.hopper.compile import compile_kernel
from tilewise.backends.hopper.feature_launch import (
    NONE,
    Features,
    bias_form,
    call_features,
    feature_tensors,
    features_key,
    is_mapped,
    tensors_in,
    with_features,
)
from tilewise.backends.hopper.features import statistics_types
from tilewise.backends.hopper.hidden import Copies, hidden_launch, hidden_mask
from tilewise.backends.hopper.intervals import mask_of
from tilewise.backends.hopper.list_launch import Walk, call_lists, is_listed
from tilewise.backends.hopper.orders import CLUSTER_BYTES, heads_together
from tilewise.backends.hopper.packed_order import Lengths, packed_order
from tilewise.backends.hopper.plan import offers
from tilewise.backends.hopper.structs import Rows, Term
from tilewise.hardware import DeviceSpec, probe_gpu
from tilewise.problem import Problem


def run_forward(problem: Problem, inputs: Inputs, stats: Features = NONE) -> tuple[Tensor, Tensor]:
    """out and lse of a supported problem, on the current stream; `stats`: the arguments that statistics are written to."""
    q, k, v = inputs[:3]
    key = ("hopper forward", q.device, q.stride(), k.stride(), v.stride(), features_key(inputs))
    if is_listed(problem):
        return run_listed(problem, inputs, key, stats)
    return launch(problem, inputs, recorder.get(problem, key, q.device, partial(plan_on, problem, inputs)), stats)


def run_statistics(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Statistics]:
    """The same with what rows saw."""
    found = Statistics(**{name.removesuffix("_ptr"): empty_lse(inputs.q) for name in statistics_types(problem)})
    arguments = {f"{name}_ptr": x for name, x in found._asdict().items() if x is not None}
    out, lse = run_forward(problem, inputs, arguments)
    return out, lse, found if "max_logit" in problem.stats else found._replace(max_logit=None)


def run_listed(
    problem: Problem, inputs: Inputs, key: tuple[Hashable, ...], stats: Features = NONE
) -> tuple[Tensor, Tensor]:
    """The same for a mask of tile lists."""
    q, k, v = inputs[:3]
    found = call_lists(problem, inputs, walk_of(problem, q.device))
    recording = recorder.get(problem, (*key, found.key), q.device, partial(plan_on, problem, inputs))
    out, lse = empty_out(q, problem.head_dim_v), empty_lse(q)
    features = feature_tensors(problem, inputs)
    if stats:
        features = features | stats
    tensors = (q, k, v, out, lse, None, None, *found.tensors, *tensors_in(features))
    if not recording.repeat(tensors):
        features = call_features(problem, inputs, moving=features)
        arguments = recording.plan.arguments._replace(lists=found.arguments, order=found.order)
        plan = recording.plan._replace(arguments=with_features(arguments, features))
        recording.record(tensors, [launch_of(plan, tensors, ())])
    return out, lse


def walk_of(problem: Problem, device: torch.device) -> Walk:
    """The forward's walk of lists. Asked in every call, so it is kept."""
    found: Walk | None = problem.memory.get(("hopper walk", device))
    if found is None:
        config = offers(problem, "forward")[0].config
        cluster = heads_together(problem, config, CLUSTER_BYTES[1])
        found = problem.memory["hopper walk", device] = Walk(config, False, spec_of(device.index or 0).units, cluster)
    return found


def launch(
    problem: Problem, inputs: Inputs, recording: Recording, stats: Features = NONE
) -> tuple[Tensor, Tensor]:
    """out and lse by the plan of a recording. Launches are repeated by addresses: only new ones need tensors of rank 4."""
    q, k, v = inputs[:3]
    if q.ndim == 3:
        out, lse = empty_packed(q, problem.head_dim_v)
    else:
        out, lse = empty_out(q, problem.head_dim_v), empty_lse(q)
    cu_q, cu_k = (inputs.cu_q, inputs.cu_k) if problem.varlen else (None, None)
    tensors: tuple[Tensor | None, ...] = (q, k, v, out, lse, cu_q, cu_k)
    terms: tuple[Term, ...] = ()
    if problem.program.tensors:
        terms = device_terms(problem, q)
        tensors += tensors_of(terms)
    plan = recording.plan
    features = feature_tensors(problem, inputs)
    if stats:
        features = features | stats
    if features:
        tensors += (*features.values(),)  # all of them tensors
    mask = None
    if inputs.bias is not None:
        copies = Copies.of(problem, q, k, v)
        tensors += copies
        if problem.program.tensors:
            mask = hidden_mask(problem, q)
            tensors += mask.tensors
    if cu_q is not None and cu_k is not None and plan.config.ORDERED:
        cluster = partial(heads_together, problem, plan.config, CLUSTER_BYTES[1])
        tensors += packed_order(problem, q, Lengths(cu_q, cu_k), plan.config, plan.arguments, False, cluster)
    if not recording.repeat(tensors):
        if q.ndim == 3:
            inputs = rank4_inputs(inputs)
            tensors = (*inputs[:3], to_rank4(out), *tensors[4:])
        if plan.config.ORDERED:
            plan = plan._replace(arguments=plan.arguments._replace(order=tensors[-2], owners=tensors[-1]))
        features = call_features(problem, inputs, plan.config.BIAS_STAGES > 0, features)
        if inputs.bias is not None:
            features |= {"bias_flag": copies.flag, "bias_again": 0}
        plan = plan._replace(arguments=with_features(plan.arguments, features))
        bias = inputs.bias if plan.config.BIAS_STAGES else None
        launches = [launch_of(plan, tensors, terms, bias)]
        if inputs.bias is not None:
            launches += launches_again(problem, inputs, plan, tensors, terms, copies, mask or hidden_mask(problem, q))
        recording.record(tensors, launches)
    return out, lse


def launches_again(
    problem: Problem,
    inputs: Inputs,
    plan: ForwardPlan,
    tensors: Any,
    terms: tuple[Term, ...],
    copies: Copies,
    mask: MaskArgs,
) -> list[Launch]:
    """With a bias: once more without what it hides, if something infinite came out."""
    flag, (q, k, v) = copies.flag, copies.parts(*inputs[:3])
    hidden = hidden_launch(problem, inputs, mask, flag, ((inputs.k, k), (inputs.v, v)), ((inputs.q, q),))
    plan = plan._replace(arguments=plan.arguments._replace(bias_flag=copies.second, bias_again=1))
    bias = inputs.bias if plan.config.BIAS_STAGES else None
    return [hidden, launch_of(plan, (q, k, v, *tensors[3:]), terms, bias)]


def launch_of(plan: ForwardPlan, tensors: Any, terms: tuple[Term, ...], bias: Tensor | None = None) -> Launch:
    """The kernel over these tensors; `terms` of a mask without tensors are the plan's."""
    q, k, v, out, lse, cu_q, cu_k = tensors[:7]
    config = plan.config
    a = plan.arguments._replace(
        lse_ptr=lse,
        cu_q=cu_q,
        cu_k=cu_k,
        terms=terms or plan.arguments.terms,
        out=None if cu_q is None else packed_rows(out),
    )
    maps = (
        Descriptor.of(q, 64, config.QK_UNIT or config.BLOCK_D),
        key_map(k, config, config.QK_UNIT or config.BLOCK_D),
        key_map(v, config, config.BLOCK_DV),
        Descriptor.of(out, 64, config.O_COLUMNS),
    )
    if bias is not None:
        maps = (*maps[:3], Descriptor.of(bias, 64, config.BLOCK_N), maps[3])  # type: ignore[assignment]
    return Launch(plan.kernel, plan.programs, (*maps, a), config)


def key_map(x: Tensor, config: Any, width: int) -> Descriptor:
    """Of keys or values: tiles, or their boxes where fours are a side of their own."""
    whole = Descriptor.of(x, config.BLOCK_N, width)
    if not config.QUADS:
        return whole
    b, h, s, d = whole.shape
    steps = whole.strides
    return Descriptor(x, [b, h, s // 4, 4, d], [*steps[:2], 4 * steps[2], steps[2], 1], [1, 1, config.BLOCK_N // 4, 2, 64])


def device_terms(problem: Problem, q: Tensor) -> tuple[Term, ...]:
    """The terms of a mask, their tensors where q is and the kernel can read them; kept with the problem."""

    def make() -> tuple[Term, ...]:
        return tuple(term_on(term, problem.batch, q.device) for term in mask_of(problem).terms)

    return kept(problem, q, "terms", make)


def term_on(term: Term, batch: int, device: torch.device) -> Term:
    """The term with its tensors on a device, one number for each sequence."""
    if term.off is None and term.first is None:
        return term
    moved = (None if t is None else _vector(t, batch, device) for t in term[4:])
    return Term(*term[:4], *moved)


def _vector(x: Any, batch: int, device: torch.device) -> Tensor:
    return torch.as_tensor(x, device=device).to(torch.int32).reshape(-1).expand(batch).contiguous()


def tensors_of(terms: tuple[Term, ...]) -> tuple[Tensor, ...]:
    return tuple(x for term in terms for x in term[4:] if x is not None)


def packed_rows(x: Tensor) -> Rows:
    return Rows(x, x.stride(1), x.stride(2), x.shape[3])


def plan_on(problem: Problem, inputs: Inputs) -> ForwardPlan:
    """The launch on the tensors' device, with its order in the device's memory."""
    device = inputs.q.device
    mapped = inputs.bias is not None and is_mapped(problem, inputs.bias)
    plan = make_plan(problem, spec_of(device.index or 0), kernel_of_config, bias_form(inputs.bias), mapped)
    return plan._replace(arguments=order_on(plan.arguments, device))


def kernel_of_config(dtype: str, arguments: Any, config: Any) -> Any:
    """The forward's kernel; one whose bias comes by a tensor map has a descriptor more."""
    return kernel_for("biased_kernel" if config.BIAS_STAGES else "forward_kernel", dtype, arguments, config)


def order_on(arguments: Any, device: torch.device) -> Any:
    """Arguments with the order of tiles, if they have one, in the device's memory."""
    order = getattr(arguments, "order", None)
    return arguments if order is None or isinstance(order, str) else arguments._replace(order=torch.from_numpy(order).to(device))


def spec_of(index: int) -> DeviceSpec:
    spec = probe_gpu(index)
    assert spec is not None, "a CUDA tensor without a CUDA device"
    return spec


_kernels = Kernels("hopper")


def kernel_for(name: str, dtype: str, arguments: Any, config: Any) -> Any:
    """The compiled kernel, one for each config, device and choice of optional arguments."""
    from triton.runtime import driver

    absent = tuple(part is None for part in _leaves(arguments))
    key = (name, dtype, absent, config, driver.active.get_current_device())
    target = driver.active.get_current_target()
    return _kernels.get(key, name, partial(compile_kernel, target, name, dtype, arguments, config))


def _leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, tuple) else [value]
