"""The forward's launch of a shape: the planned tile's kernel, its arguments, over which work tiles in which order."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.hopper.choose import cap_form
from tilewise.backends.hopper.compile import pointer
from tilewise.backends.hopper.config import Config
from tilewise.backends.hopper.features import feature_types, statistics_types
from tilewise.backends.hopper.intervals import IntervalMask, mask_of, typed
from tilewise.backends.hopper.list_plan import list_arguments
from tilewise.backends.hopper.orders import host_order
from tilewise.backends.hopper.plan import config_of, tiles
from tilewise.backends.hopper.structs import Arguments, Divisor, Rows
from tilewise.hardware.spec import DeviceSpec
from tilewise.problem import Problem

LOG2E = 1.4426950408889634


class ForwardPlan(NamedTuple):
    """All of a launch that does not depend on the call's tensors."""

    kernel: Any
    config: Config
    arguments: Arguments  # with types in place of addresses; the order is an array of the host
    programs: int


def make_plan(problem: Problem, spec: DeviceSpec, compile_: Any, bias: str = "", mapped: bool = True) -> ForwardPlan:
    """The launch on a device; `compile_(dtype, arguments, config)` gives the kernel. `bias`: the form of a call's own."""
    mask = mask_of(problem)
    config = config_of(problem, tiles(problem, spec)["forward"])
    config = config._replace(BIAS=bias or config.BIAS)
    if not config.BIAS.endswith("x2") or not mapped:
        config = config._replace(BIAS_STAGES=0)
    blocks = blocks_of(problem, problem.seqlen_q, config.BLOCK_M)
    heads = problem.heads * (1 if problem.varlen else problem.batch)
    programs = min(blocks * heads, spec.units)
    # "*i32": written on the device
    order: Any = "*i32" if mask.listed or config.ORDERED else host_order(problem, mask, config, spec.units)
    a = Arguments(
        lse_ptr="*fp32",
        out=Rows(pointer(problem.dtype), "i64", "i64", 0) if problem.varlen else None,  # type: ignore[arg-type]
        last_q=problem.seqlen_q - 1,
        last_block=blocks - 1,
        stat_blocks=None,
        stat_tiles=None,
        **tile_arguments(problem, mask, problem.heads, blocks, config.BIAS, config.BIAS_STAGES > 0),
        total=blocks * heads,
        programs=programs,
        order=order,
        owners="*i32" if config.ORDERED else None,
        lists=list_arguments(problem, config),
        alibi_unit=1.0 / (problem.scale * LOG2E) if config.ALIBI_FIRST else None,
        sinks_ptr="*fp32" if problem.sinks else None,
        **statistics_types(problem),
    )
    return ForwardPlan(compile_(problem.dtype, a, config), config, a, programs)


def tile_arguments(
    problem: Problem, mask: IntervalMask, heads: int, blocks: int, bias: str, mapped: bool = False
) -> dict[str, Any]:
    """The arguments of every kernel whose work tiles are `blocks` of each of so many heads."""
    unit = 1.0 if bias else LOG2E  # with a bias scores are in natural units
    slope = problem.scale / problem.softcap if problem.softcap else 0.0
    scale = problem.softcap or problem.scale
    if problem.softcap and cap_form(problem) == "cap":
        slope, scale = -2 * LOG2E * slope, 2 * scale
    return {
        "cu_q": "*i32" if problem.varlen else None,
        "cu_k": "*i32" if problem.varlen else None,
        "terms": tuple(typed(term) for term in mask.terms),
        "heads": Divisor.of(heads),
        "group": Divisor.of(problem.group),
        "blocks": Divisor.of(blocks),
        "batch": problem.batch,
        "len_q": problem.seqlen_q,
        "len_k": problem.seqlen_k,
        "scale_log2": scale * unit,
        "softcap_slope": slope,
        **feature_types(problem, bias, mapped),
    }


def blocks_of(problem: Problem, length: int, block: int) -> int:
    """Tiles of a head; what packed sequences of any lengths need at most, see find_sequence."""
    return length // block + problem.batch if problem.varlen else -(-length // block)
