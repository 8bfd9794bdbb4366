"""From a Problem to a launch: the plan of a shape is made once, a call only allocates, describes its tensors and goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, empty_lse, empty_out
from tilewise.backends.gpu.compiled import Kernels
from tilewise.backends.gpu.launch import Descriptor
from tilewise.backends.hopper.compile import compile_for
from tilewise.backends.hopper.config import Config, shortened, tiles_for
from tilewise.backends.hopper.intervals import Form, form_of, on_device, present, unseen_keys
from tilewise.backends.hopper.order import best_order, choose, visited_keys
from tilewise.backends.hopper.repeat import repeatable
from tilewise.backends.hopper.structs import Arguments, Divisor, Rows, Term
from tilewise.problem import Problem

CLUSTER_BYTES = (8 << 20, 24 << 20)
"""Keys and values of heads that are walked together: few, so that long tiles and short ones mix, and at most what the L2 cache
(50 MiB on H100 and H200) holds beside the rest."""
LOG2E = 1.4426950408889634
EARLY_KEYS = 2048
"""Up to so many keys the place of the queries is given back early without a mask too (H200, head dim 256: S 512 and 2048 0.5 to
1 % faster, 8192 and 16384 1 % slower; causal 0.5 to 2 % faster at all four)."""


class Plan(NamedTuple):
    """All of a launch that does not depend on the call's tensors, and the calls made so far."""

    kernel: Any
    config: Config
    arguments: Arguments  # its tensors are still to come, but for the order
    programs: int
    calls: dict[tuple[Any, ...], Callable[[], Any]]  # by stream, strides and addresses: the launch, ready to be repeated


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
        form = form_of(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
        assert isinstance(form, Form)
        terms = tuple(on_device(term, problem.batch, q.device) for term in form.terms)
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
        Descriptor(out, 64, config.OUT_WIDTH),
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


def make_plan(problem: Problem, processors: int, compile_: Any, tile: Config | None = None) -> Plan:
    """The plan on a GPU with so many multiprocessors; `compile_(dtype, arguments, config)` gives the kernel, `tile` overrides
    the table's."""
    form = form_of(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
    assert isinstance(form, Form), "the backend has said no to this problem"
    unseen = problem.varlen or unseen_keys(form, problem.seqlen_q, problem.seqlen_k)
    tile = tile or tile_of(problem, form, unseen)
    tail = not form.terms and problem.seqlen_k % tile.BLOCK_N > 0
    roomy = not (form.left or unseen)
    held = tile.Q_HELD if roomy and not (form.band and newer_registers()) else 0
    if newer_registers():
        cramped = not roomy or (tail and tile.BLOCK_DV == 256)
    else:
        cramped = unseen and tile.BLOCK_DV == 128
    keys = visited_keys(form, tile, problem.seqlen_q) if form.band and not problem.varlen else None
    config = tile._replace(
        TERMS=len(form.terms),
        BAND=form.band,
        LEFT=form.left,
        # the others leave no registers for these
        LATE=not cramped,
        Q_HELD=held,
        Q_EARLY=held > 0 and (form.band or problem.seqlen_k <= EARLY_KEYS),
        VARLEN=problem.varlen,
        BOTTOM=form.bottom,
        TAIL=tail,
        UNSEEN=unseen,
        SCORES="softcap" if problem.softcap > 0 else "fold" if problem.scale > 0 else "scale",
    )
    if problem.varlen:
        # what sequences of any lengths need at most: see find_sequence
        blocks, heads = problem.seqlen_q // config.BLOCK_M + problem.batch, problem.heads
    else:
        blocks, heads = -(-problem.seqlen_q // config.BLOCK_M), problem.batch * problem.heads
    total = blocks * heads
    programs = min(total, processors)
    order = None
    if keys is not None:
        clusters = tuple(heads_together(problem, config, size) for size in CLUSTER_BYTES)
        order = torch.from_numpy(best_order(keys, heads, clusters, programs))
    a = Arguments(
        lse_ptr=None,
        cu_q=True if problem.varlen else None,
        cu_k=True if problem.varlen else None,
        order=order,
        out=Rows(None, 0, 0, 0) if problem.varlen else None,
        terms=tuple(present(term) for term in form.terms),
        heads=Divisor.of(problem.heads),
        group=Divisor.of(problem.group),
        blocks=Divisor.of(blocks),
        batch=problem.batch,
        len_q=problem.seqlen_q,
        len_k=problem.seqlen_k,
        last_q=problem.seqlen_q - 1,
        last_block=blocks - 1,
        total=total,
        programs=programs,
        unit=(problem.softcap or problem.scale) * LOG2E,
        slope=problem.scale / problem.softcap if problem.softcap else 0.0,
    )
    return Plan(compile_(problem.dtype, a, config), config, a, programs, {})


def tile_of(problem: Problem, form: Form, unseen: bool) -> Config:
    """The table's tile. Three warpgroups have no registers for rows that begin after key 0 and for keys that no query sees, as in
    a packed batch."""
    tiles = tiles_for(problem.head_dim, problem.head_dim_v)
    if unseen or form.left or (form.band and newer_registers()):
        tiles = tiles[:1]
    if newer_registers() and form.terms and (unseen or form.left) and tiles[0].BLOCK_D > 64:
        return shortened(tiles[0])
    return tiles[0] if problem.varlen else choose(tiles, form, problem.seqlen_q, problem.seqlen_k)


@cache
def newer_registers() -> bool:
    """From 3.8 on Triton's compiler needs so many more registers that loops spill where a mask meets the widest tile or queries
    in registers, or head dim 128 rows that begin after key 0 or keys that no query sees."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 8)


def heads_together(problem: Problem, config: Config, size: int) -> int:
    """How many heads are walked side by side: those whose keys and values have the size, and a divisor of their number."""
    heads = problem.batch * problem.heads
    most = max(1, size // (2 * problem.seqlen_k * (config.BLOCK_D + config.BLOCK_DV))) * problem.group
    return max(n for n in range(1, min(most, heads) + 1) if heads % n == 0)


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
    return _kernels.get(key, "forward_kernel", lambda: compile_for(target, dtype, a, config))
