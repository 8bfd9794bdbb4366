"""The JVP's launch of a shape: its kernel, its arguments, over which work tiles in which order."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.hopper.arguments import LOG2E, blocks_of
from tilewise.backends.hopper.compile import pointer
from tilewise.backends.hopper.intervals import mask_of, typed
from tilewise.backends.hopper.jvp.choose import Moving, jvp_choice
from tilewise.backends.hopper.jvp.config import JvpConfig
from tilewise.backends.hopper.jvp.structs import JvpArguments
from tilewise.backends.hopper.orders import forward_order
from tilewise.backends.hopper.structs import Divisor, Rows
from tilewise.hardware.spec import DeviceSpec
from tilewise.problem import Problem


class JvpPlan(NamedTuple):
    """All of a launch that does not depend on the call's tensors."""

    kernel: Any
    config: JvpConfig
    arguments: JvpArguments  # with types in place of addresses; the order is an array of the host
    programs: int


def make_plan(problem: Problem, spec: DeviceSpec, compile_: Any, moving: Moving = Moving()) -> JvpPlan:
    """The launch on a device; `compile_(dtype, arguments, config)` gives the kernel."""
    mask, config = mask_of(problem), jvp_choice(problem, moving).config
    blocks = blocks_of(problem, problem.seqlen_q, config.BLOCK_M)
    heads = problem.heads * (1 if problem.varlen else problem.batch)
    programs = min(blocks * heads, spec.units)
    order: Any = None
    if mask.uneven and not problem.varlen:
        order = forward_order(problem, mask, config, spec.units, moving=2)
    elif config.ORDERED:
        order = "*i32"  # written on the device
    rows = Rows(pointer(problem.dtype), "i64", "i64", 0) if problem.varlen else None  # type: ignore[arg-type]
    cu = "*i32" if problem.varlen else None
    a = JvpArguments(
        lse_ptr="*fp32",
        lse_t_ptr="*fp32",
        cu_q=cu,
        cu_k=cu,
        order=order,
        owners="*i32" if config.ORDERED else None,
        out=rows,
        out_t=rows,
        terms=tuple(typed(term) for term in mask.terms),
        heads=Divisor.of(problem.heads),
        group=Divisor.of(problem.group),
        blocks=Divisor.of(blocks),
        batch=problem.batch,
        len_q=problem.seqlen_q,
        len_k=problem.seqlen_k,
        last_q=problem.seqlen_q - 1,
        last_block=blocks - 1,
        total=blocks * heads,
        programs=programs,
        scale_log2=problem.scale * LOG2E,
        scale=problem.scale,
    )
    return JvpPlan(compile_(problem.dtype, a, config), config, a, programs)
