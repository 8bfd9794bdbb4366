"""From a Problem to the backward's launches: the plan of a shape is made once, a call allocates and repeats recorded launches."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import BackwardInputs, Grads, Inputs, rank4_inputs, to_rank4
from tilewise.backends.gpu.launch import Address, Descriptor, describable, view
from tilewise.backends.gpu.record import Launch, Recording, recorder
from tilewise.backends.gpu.structs import MaskArgs
from tilewise.backends.hopper.backward.arguments import BackwardPlan, Step, make_plan
from tilewise.backends.hopper.backward.choose import with_bias_gradient
from tilewise.backends.hopper.backward.config import KeysConfig, QueriesConfig
from tilewise.backends.hopper.feature_launch import (
    NONE,
    Features,
    backward_form,
    bias_gradient,
    call_features,
    feature_tensors,
    features_key,
    rounded_gradient,
    sink_gradient,
    tensors_in,
    with_features,
)
from tilewise.backends.hopper.features import is_broadcast
from tilewise.backends.hopper.hidden import Copies, hidden_launch, hidden_mask
from tilewise.backends.hopper.launch import device_terms, kernel_for, order_on, packed_rows, spec_of, tensors_of
from tilewise.backends.hopper.list_launch import CallLists, Walk, call_lists, is_listed
from tilewise.backends.hopper.orders import heads_fitting
from tilewise.backends.hopper.packed_order import Lengths, Order, packed_order
from tilewise.backends.hopper.plan import plan_of
from tilewise.backends.hopper.structs import Arguments, Plane, PrePostArguments, Term
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

    def of_rank4(self) -> Memory:
        """The tensors of a packed batch as launches are made from them."""
        names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        return self._replace(**{name: to_rank4(getattr(self, name)) for name in names})


class Again(NamedTuple):
    """A call with a bias, made once more if something infinite came out: the flag and copies without what the bias hides. Sums
    of dQ begin at 0 again, and are rounded after that."""

    inputs: Inputs
    mask: MaskArgs
    copies: Copies  # of q, k, v, dout
    added: Tensor | None  # the gradient of the bias where it is added up

    def launches(
        self, problem: Problem, steps: tuple[Step, ...], plan: BackwardPlan, memory: Memory, terms: tuple[Term, ...]
    ) -> list[Launch]:
        flag, (q, k, v, dout) = self.copies.flag, self.copies.parts(*self.inputs[:3], memory.dout)
        keys, queries = ((memory.k, k), (memory.v, v)), ((memory.q, q), (memory.dout, dout))
        added = None if self.added is None else (self.added, self.added.numel())
        sums = (sums_of(plan, memory), plan.dq) if plan.dq else None
        hidden = hidden_launch(problem, self.inputs, self.mask, flag, keys, queries, (added, sums))
        clean: Any = memory._replace(q=q, k=k, v=v, dout=dout)  # type: ignore[arg-type]  # parts, of which maps are made
        main = [step for step in steps if isinstance(step.arguments, Arguments)]
        second = {"bias_flag": self.copies.second, "bias_again": 1}
        main = [step._replace(arguments=step.arguments._replace(**second)) for step in main]
        return [hidden, *(launch_of(step, plan, clean, terms) for step in main)]


def run_backward(problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
    """The gradients of a supported problem, on the current stream; those of a packed batch may be (T, H, D)."""
    out, lse, dout, dlse, needs = given
    if needs.dbias and inputs.bias is not None:
        problem = with_bias_gradient(problem)
    if lse.stride(2) != 1:
        lse = lse.contiguous()
    q, k, v = inputs[:3]
    strides = [None if x is None else x.stride() for x in (q, k, v, out, lse, dout, dlse)]
    key = ("hopper backward", q.device, *strides, features_key(inputs), needs.dbias)
    found = lists_of_steps(problem, inputs)
    key = (*key, *(lists.key for lists in found.values())) if found else key
    recording = recorder.get(problem, key, q.device, partial(plan_on, problem, inputs, given))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scratch = q.new_empty_strided((recording.plan.stats + recording.plan.dq,), (1,), dtype=torch.float32)
    cu_q, cu_k = (inputs.cu_q, inputs.cu_k) if problem.varlen else (None, None)
    features = feature_tensors(problem, inputs)
    if problem.sinks:  # as many as there are of each statistic
        features["dsinks_ptr"] = scratch.new_empty(recording.plan.stats // 2)
    memory = Memory(q, k, v, out, lse, dout, dlse, dq, dk, dv, scratch, cu_q, cu_k)
    again = None
    if inputs.bias is not None:
        dbias = None
        if needs.dbias:
            dbias, written = bias_gradient(problem, inputs.bias)
            features |= written
        copies = Copies.of(problem, q, k, v, dout)
        again = Again(inputs, hidden_mask(problem, q), copies, dbias if is_broadcast(problem) else None)
    launch(problem, inputs, memory, recording, found, features, again)
    grads = Grads(dq if needs.dq else None, dk if needs.dk else None, dv if needs.dv else None)
    if inputs.bias is not None and dbias is not None:
        grads = grads._replace(dbias=rounded_gradient(dbias, inputs.bias))
    if needs.dsinks and inputs.sinks is not None:
        grads = grads._replace(dsinks=sink_gradient(features["dsinks_ptr"], inputs.sinks, 1 if problem.varlen else q.shape[0]))
    return grads


def lists_of_steps(problem: Problem, inputs: Inputs) -> dict[str, CallLists]:
    """Under a mask of tile lists: those of each kernel that walks some."""
    if not is_listed(problem):
        return {}
    walks = walks_of(problem, inputs.q.device)
    return {kernel: call_lists(problem, inputs, walk) for kernel, walk in walks.items()}


def walks_of(problem: Problem, device: torch.device) -> dict[str, Walk]:
    """By kernel that walks lists. Asked in every call, so it is kept with the problem."""
    found: dict[str, Walk] | None = problem.memory.get(("hopper backward walks", device))
    if found is not None:
        return found
    units = spec_of(device.index or 0).units

    def walk(config: KeysConfig | QueriesConfig) -> Walk:
        of_keys = isinstance(config, KeysConfig)
        heads = (problem.kv_heads if of_keys else problem.heads) * problem.batch
        return Walk(config, of_keys, units, heads_fitting(problem, config, heads))

    planned = {one.tile.kernel: one.config for pass_, one in plan_of(problem).items() if pass_ != "forward"}
    found = {kernel: walk(config) for kernel, config in planned.items() if config.LISTS is not None}
    problem.memory["hopper backward walks", device] = found
    return found


def launch(
    problem: Problem,
    inputs: Inputs,
    memory: Memory,
    recording: Recording,
    found: dict[str, CallLists] | None = None,
    features: Features = NONE,
    again: Again | None = None,
) -> None:
    """Fill dq, dk and dv by the plan of a recording; `found` are the tile lists of its steps, if the mask has some."""
    terms: tuple[Term, ...] = ()
    tensors: Any = memory
    if found:
        tensors = (*memory, *(x for lists in found.values() for x in lists.tensors))
    elif problem.program.tensors:
        terms = device_terms(problem, memory.q)
        tensors = (*memory, *tensors_of(terms))
    orders = packed_orders(problem, memory, recording.plan) if problem.varlen else {}
    if orders:
        tensors = (*tensors, *(x for order in orders.values() for x in order))
    if features:
        tensors = (*tensors, *tensors_in(features))
    if again is not None:
        tensors = (*tensors, *again.copies, *again.mask.tensors)
    if recording.repeat(tensors):
        return
    if memory.q.ndim == 3:
        inputs = rank4_inputs(inputs)
        memory = memory.of_rank4()
        tensors = (*memory, *tensors[len(memory) :])
        again = None if again is None else again._replace(inputs=inputs)
    tidy = readable(memory)
    steps = recording.plan.steps
    if found:
        steps = tuple(with_lists(problem, step, found) for step in steps)
    if orders:
        steps = tuple(with_order(step, orders) for step in steps)
    if features:
        features = call_features(problem, inputs, moving=features)
        if again is not None:
            features |= {"bias_flag": again.copies.flag, "bias_again": 0}
        steps = tuple(step._replace(arguments=with_features(step.arguments, features)) for step in steps)
    launches = [launch_of(step, recording.plan, tidy, terms) for step in steps]
    if again is not None:
        before = len(steps) - (steps[-1].name == "postprocess_kernel")
        launches[before:before] = again.launches(problem, steps, recording.plan, tidy, terms)
    if tidy is memory:
        recording.record(tensors, launches)
    else:  # over copies of this call alone
        for one in launches:
            one.run()


def with_lists(problem: Problem, step: Step, found: dict[str, CallLists]) -> Step:
    """The step with its lists' addresses."""
    if step.name not in found or not isinstance(step.arguments, Arguments):
        return step
    own = found[step.name]
    return step._replace(arguments=step.arguments._replace(lists=own.arguments, order=own.order))


def packed_orders(problem: Problem, memory: Memory, plan: BackwardPlan) -> dict[str, Order]:
    """The orders of the work tiles of a packed batch, by kernel that has one."""
    found: dict[str, Order] = {}
    assert memory.cu_q is not None and memory.cu_k is not None
    lengths = Lengths(memory.cu_q, memory.cu_k)
    for name, _, config, arguments, _ in plan.steps:
        if isinstance(arguments, Arguments) and config.ORDERED:
            by_key = isinstance(config, KeysConfig)
            cluster = partial(heads_fitting, problem, config, problem.kv_heads if by_key else problem.heads)
            found[name] = packed_order(problem, memory.q, lengths, config, arguments, by_key, cluster)
    return found


def with_order(step: Step, orders: dict[str, Order]) -> Step:
    """The step with the order of its work tiles."""
    if step.name not in orders or not isinstance(step.arguments, Arguments):
        return step
    return step._replace(arguments=step.arguments._replace(**orders[step.name]._asdict()))


def readable(memory: Memory) -> Memory:
    """The same numbers where the kernels can read them."""
    out = memory.out if describable(memory.out) else memory.out.contiguous()
    dout = memory.dout if describable(memory.dout) else memory.dout.contiguous()
    dlse = memory.dlse if memory.dlse is None or memory.dlse.is_contiguous() else memory.dlse.contiguous()
    if out is memory.out and dout is memory.dout and dlse is memory.dlse:
        return memory
    return memory._replace(out=out, dout=dout, dlse=dlse)


def launch_of(step: Step, plan: BackwardPlan, memory: Memory, terms: tuple[Term, ...]) -> Launch:
    """A step over these tensors."""
    scratch: dict[str, Any] = {"stats_ptr": memory.scratch, "dq_ptr": sums_of(plan, memory)}
    maps: tuple[Any, ...] = ()
    arguments: Any = step.arguments
    if isinstance(arguments, PrePostArguments):
        arguments = arguments._replace(
            out=plane(memory.out),
            dout=plane(memory.dout),
            dq=plane(memory.dq),
            lse_ptr=memory.lse,
            lse_b=memory.lse.stride(0),
            lse_h=memory.lse.stride(1),
            dlse_ptr=memory.dlse,
            cu_q=memory.cu_q,
            **scratch,
        )
    else:
        terms = terms or arguments.terms
        arguments = arguments._replace(cu_q=memory.cu_q, cu_k=memory.cu_k, terms=terms, **scratch)
        if memory.cu_k is not None:
            packed = {name: packed_rows(getattr(memory, name)) for name in ("dq", "dk", "dv")}
            arguments = arguments._replace(**packed)
        maps = descriptors(step.config, memory, plan.stats)
    return Launch(step.kernel, step.programs, (*maps, arguments), step.config)


def sums_of(plan: BackwardPlan, memory: Memory) -> Address:
    """Where dQ is added up: behind the statistics."""
    return Address(4 * plan.stats, memory.scratch)


def descriptors(config: KeysConfig | QueriesConfig, memory: Memory, stats: int) -> tuple[Descriptor, ...]:
    """Tensor maps in the order of the kernels' arguments; `stats` numbers of the scratch memory are statistics."""
    d, dv, queries = config.BLOCK_D, config.BLOCK_DV, isinstance(config, QueriesConfig)
    rows = 64 if queries else config.BLOCK_M
    operands = (
        Descriptor.of(memory.q, rows, d),
        Descriptor.of(memory.dout, rows, dv),
        Descriptor.of(memory.k, config.BLOCK_N, d),
        Descriptor.of(memory.v, config.BLOCK_N, dv),
    )
    if queries:
        return (*operands, Descriptor.of(memory.dq, 64, d))
    statistics = Descriptor(memory.scratch, [stats], [1], [2 * rows])
    return (*operands, statistics, Descriptor.of(memory.dk, 64, d), Descriptor.of(memory.dv, 64, dv))


def plane(x: Tensor) -> Plane:
    return Plane(*view(x)[:4], x.shape[3])


def plan_on(problem: Problem, inputs: Inputs, given: BackwardInputs) -> BackwardPlan:
    """The launches on the tensors' device, with their orders in the device's memory."""
    device = inputs.q.device
    bias = backward_form(problem, inputs.bias, given.needs.dbias)
    plan = make_plan(problem, spec_of(device.index or 0), kernel_for, given.dlse is not None, bias)
    steps = (step._replace(arguments=order_on(step.arguments, device)) for step in plan.steps)
    return plan._replace(steps=tuple(steps))
