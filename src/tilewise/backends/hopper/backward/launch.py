"""From a Problem to the backward's launches: the plan of a shape is made once, a call only allocates, describes and goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.backends.base import Grads, Inputs, Needs
from tilewise.backends.gpu.launch import Address, Descriptor, describable
from tilewise.backends.hopper.backward.compile import compile_for, pointer
from tilewise.backends.hopper.backward.config import KEYS, QUERIES, KeysConfig, QueriesConfig, widths
from tilewise.backends.hopper.backward.structs import Edges, Plane, Walk
from tilewise.backends.hopper.intervals import Form, form_of, on_device
from tilewise.backends.hopper.launch import CALLS_LIMIT, LOG2E, PLANS_LIMIT, address, multiprocessors
from tilewise.backends.hopper.order import tile_order, visited_keys
from tilewise.backends.hopper.repeat import repeatable
from tilewise.backends.hopper.structs import Divisor, Rows, Term
from tilewise.problem import Problem

L2_BYTES = 24 << 20
"""Of the L2 cache (50 MiB on H100 and H200) for the queries and gradients of heads that are walked together."""


class Step(NamedTuple):
    """One kernel of a plan; the addresses in its arguments are still to come, but for the order."""

    name: str
    kernel: Any
    config: KeysConfig | QueriesConfig
    arguments: Walk | Edges
    programs: int


class Plan(NamedTuple):
    """All of a call that does not depend on its tensors, and the calls made so far."""

    steps: tuple[Step, ...]
    stats: int  # numbers of scratch memory: of the statistics, and of dQ
    dq: int
    calls: dict[tuple[Any, ...], tuple[Callable[[], Any], ...]]


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


def run_backward(
    problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, needs: Needs
) -> Grads:
    """The gradients of a supported problem, on the current stream."""
    plan = plan_for(problem, inputs.q.device, dlse is not None)
    q, k, v = inputs[:3]
    memory = Memory(
        q,
        k,
        v,
        out if describable(out) else out.contiguous(),
        lse,
        dout if describable(dout) else dout.contiguous(),
        None if dlse is None else dlse.contiguous(),
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        q.new_empty(plan.stats + plan.dq, dtype=torch.float32),
        inputs.cu_q if problem.varlen else None,
        inputs.cu_k if problem.varlen else None,
    )
    launch(problem, memory, plan)
    return Grads(memory.dq if needs.dq else None, memory.dk if needs.dk else None, memory.dv if needs.dv else None)


def launch(problem: Problem, memory: Memory, plan: Plan) -> None:
    terms: tuple[Term, ...] = ()
    if problem.program.tensors:
        form = form_of(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
        assert isinstance(form, Form)
        terms = tuple(on_device(term, problem.batch, memory.q.device) for term in form.terms)
    q, k, v, out, _, dout = memory[:6]
    stream = torch._C._cuda_getCurrentRawStream(q.device.index)
    addresses = [x.data_ptr() for x in memory if x is not None]
    held = [x.data_ptr() for term in terms for x in term[4:] if x is not None]
    strides = (q.stride(), k.stride(), v.stride(), out.stride(), dout.stride(), memory.dq.stride(), memory.dk.stride())
    key = (stream, *strides, memory.dv.stride(), *addresses, *held)
    calls = plan.calls.get(key)
    if calls is None:
        if len(plan.calls) >= CALLS_LIMIT:
            plan.calls.clear()
        calls = plan.calls[key] = tuple(bind(step, plan, memory, terms, stream) for step in plan.steps)
    for call in calls:
        call()


def bind(step: Step, plan: Plan, memory: Memory, terms: tuple[Term, ...], stream: int) -> Callable[[], Any]:
    """A step over these tensors, of which only the addresses are kept."""
    stats = memory.scratch.data_ptr()
    dq = stats + 4 * plan.stats
    maps: tuple[Any, ...] = ()
    arguments: Walk | Edges
    if isinstance(step.arguments, Edges):
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
    results = [Descriptor(memory.dq, 64, d)] if queries else [Descriptor(memory.dk, 64, d), Descriptor(memory.dv, 64, dv)]
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
    return Plane(x.data_ptr(), *(0 if size == 1 else step for size, step in zip(x.shape[:3], x.stride(), strict=False)), x.shape[3])


def packed_rows(x: Tensor) -> Rows:
    return Rows(x.data_ptr(), x.stride(1), x.stride(2), x.shape[3])


def plan_for(problem: Problem, device: torch.device, with_dlse: bool) -> Plan:
    program = problem.program
    key = (
        program.structure, program.ints, problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k,
        problem.head_dim, problem.head_dim_v, problem.dtype, problem.scale, problem.softcap, problem.varlen, problem.deterministic, device,
        with_dlse,
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
        if isinstance(a, Edges) or a.order is None:
            return step
        return step._replace(arguments=a._replace(order=a.order.to(device)))

    return plan._replace(steps=tuple(moved(step) for step in plan.steps))


def make_plan(
    problem: Problem, processors: int, compile_: Any, with_dlse: bool = False, tile: KeysConfig | None = None
) -> Plan:
    """The plan on a GPU with so many multiprocessors; `compile_(name, dtype, arguments, config)` gives the kernels, `tile`
    overrides the table's."""
    form = form_of(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
    assert isinstance(form, Form), "the backend has said no to this problem"
    dims = widths(problem.head_dim, problem.head_dim_v)
    tile = tile or KEYS[dims]._replace(REDUCE=not problem.deterministic)
    about: dict[str, Any] = {
        "SEEDED": tile.SEEDED and problem.softcap == 0 and problem.scale > 0,
        "TERMS": len(form.terms),
        "BAND": form.band,
        "LEFT": form.left,
        "VARLEN": problem.varlen,
        "BOTTOM": form.bottom,
        "SCORES": "softcap" if problem.softcap > 0 else "fold",
    }
    config = tile._replace(**about)
    plain = config._replace(TERMS=0, BAND=False, LEFT=False, SCORES="fold", BOTTOM=False)
    stat_blocks = blocks_of(problem, problem.seqlen_q, config.BLOCK_M)
    tiles = stat_blocks * problem.heads * (1 if problem.varlen else problem.batch)
    edges = edges_of(problem, config, stat_blocks, with_dlse)

    def step(name: str, own: KeysConfig | QueriesConfig, arguments: Walk | Edges, programs: int) -> Step:
        return Step(name, compile_(name, problem.dtype, types_of(arguments), own), own, arguments, programs)

    keys = walk_of(problem, form, config, stat_blocks, processors)
    first = step("prepare_kernel", plain, edges, tiles)
    second = step("split_kernel" if config.SPLIT else "keys_kernel", config, keys, keys.programs)
    if config.REDUCE:
        third = step("cast_kernel", plain, edges, tiles)
    else:
        own = QUERIES[dims]._replace(**about)
        queries = walk_of(problem, form, own, stat_blocks, processors)
        third = step("queries_kernel", own, queries, queries.programs)
    scratch = tiles * config.BLOCK_M * config.BLOCK_D if config.REDUCE else 0
    return Plan((first, second, third), 2 * tiles * config.BLOCK_M, scratch, {})


def types_of(arguments: Walk | Edges) -> Walk | Edges:
    """The arguments with the order as the type of its pointer: kernels do not depend on what stands in it."""
    if isinstance(arguments, Edges) or arguments.order is None:
        return arguments
    return arguments._replace(order="*i32")


def blocks_of(problem: Problem, length: int, block: int) -> int:
    """Tiles of a head; what packed sequences of any lengths need at most, see find_sequence."""
    return length // block + problem.batch if problem.varlen else -(-length // block)


def walk_of(
    problem: Problem, form: Form, config: KeysConfig | QueriesConfig, stat_blocks: int, processors: int
) -> Walk:
    """Arguments of a kernel that walks over tiles of keys, or of queries."""
    of_keys = isinstance(config, KeysConfig)
    length, block = (problem.seqlen_k, config.BLOCK_N) if of_keys else (problem.seqlen_q, config.BLOCK_M)
    own_heads = problem.kv_heads if of_keys else problem.heads
    blocks = blocks_of(problem, length, block)
    heads = own_heads * (1 if problem.varlen else problem.batch)
    programs = min(blocks * heads, processors)
    order = None
    if config.BAND and not problem.varlen:
        if isinstance(config, KeysConfig):
            # tiles of keys are numbered from the first to the last
            times = visiting_queries(form, config, problem.seqlen_q, problem.seqlen_k)[::-1] * problem.group
        else:
            times = visited_keys(form, config, problem.seqlen_q)  # type: ignore[arg-type]
        order = torch.from_numpy(tile_order(times, heads, heads_together(problem, config, heads), programs))
    packed = "*i32" if problem.varlen else None
    rows = Rows(pointer(problem.dtype), 0, 0, 0) if problem.varlen else None
    return Walk(
        cu_q=packed,
        cu_k=packed,
        order=order,
        terms=tuple(Term(*term[:4], *(None if t is None else "*i32" for t in term[4:])) for term in form.terms),
        heads=Divisor.of(own_heads),
        group=Divisor.of(problem.group),
        blocks=Divisor.of(blocks),
        batch=problem.batch,
        len_q=problem.seqlen_q,
        len_k=problem.seqlen_k,
        stat_blocks=stat_blocks,
        total=blocks * heads,
        programs=programs,
        unit=(problem.softcap or problem.scale) * LOG2E,
        slope=problem.scale / problem.softcap if problem.softcap else 0.0,
        scale=float(problem.scale),
        stats_ptr="*fp32",
        dq_ptr="*fp32",
        dq=rows,
        dk=rows,
        dv=rows,
    )


def edges_of(problem: Problem, config: KeysConfig, stat_blocks: int, with_dlse: bool) -> Edges:
    anywhere = Plane(pointer(problem.dtype), 0, 0, 0, 0)
    unit = problem.scale * LOG2E
    return Edges(
        out=anywhere,
        dout=anywhere,
        dq=anywhere,
        lse_ptr="*fp32",
        dlse_ptr="*fp32" if with_dlse else None,
        stats_ptr="*fp32",
        dq_ptr="*fp32",
        cu_q="*i32" if problem.varlen else None,
        heads=Divisor.of(problem.heads),
        blocks=Divisor.of(stat_blocks),
        batch=problem.batch,
        len_q=problem.seqlen_q,
        factor=-LOG2E / unit if config.SEEDED else LOG2E,
        scale=float(problem.scale),
    )


def visiting_queries(form: Form, config: KeysConfig, queries: int, keys: int) -> np.ndarray:
    """Queries in the tiles that see each tile of keys, int64 [blocks]; `schedule.visiting` on the host.

    Numbers that only the device knows (offsets, padding) are taken as absent.
    """
    n0 = np.arange(0, keys, config.BLOCK_N)
    lo = np.min([np.where(n0 < term.end, n0 + 1 - term.past, queries) for term in form.terms], axis=0)
    tiles = -(-queries // config.BLOCK_M)
    first = np.minimum(np.maximum(lo, 0) // config.BLOCK_M, tiles - 1)
    past = np.full_like(n0, queries)
    if form.left:
        n1 = n0 + config.BLOCK_N - 1
        past = np.minimum(np.where(n1 >= form.terms[0].start, n1 + 1 - form.terms[0].lo, 0), queries)
    return np.asarray(np.maximum(-(-past // config.BLOCK_M) - first, 1) * config.BLOCK_M)


def heads_together(problem: Problem, config: KeysConfig | QueriesConfig, heads: int) -> int:
    """How many heads are walked side by side: those whose streamed tensors (and sums of dQ) the L2 cache holds."""
    width = 2 * (config.BLOCK_D + config.BLOCK_DV)
    if isinstance(config, KeysConfig):
        each = problem.group * problem.seqlen_q * (width + 4 * config.BLOCK_D)
    else:
        each = -(-problem.seqlen_k * width // problem.group)
    most = max(1, L2_BYTES // each)
    return max(n for n in range(1, min(most, heads) + 1) if heads % n == 0)


_kernels: dict[tuple[Any, ...], Any] = {}


def kernel_for(name: str, dtype: str, arguments: Any, config: KeysConfig | QueriesConfig) -> Any:
    """The compiled kernel, one for each config, kind of arguments and device."""
    from triton.runtime import driver

    absent = tuple(part is None for part in _flat(arguments))
    key = (name, dtype, absent, config, driver.active.get_current_device())
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = compile_for(driver.active.get_current_target(), name, dtype, arguments, config)
    return kernel


def _flat(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _flat(part)] if isinstance(value, tuple) else [value]
