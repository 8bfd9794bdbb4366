"""The backward's launches of a shape: the planned tiles' kernels, their arguments, over which work tiles in which order."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.hopper.arguments import LOG2E, blocks_of, tile_arguments
from tilewise.backends.hopper.backward.config import KeysConfig, QueriesConfig
from tilewise.backends.hopper.choose import cap_form
from tilewise.backends.hopper.compile import pointer
from tilewise.backends.hopper.features import BiasForm, gradient_types, prepost_types
from tilewise.backends.hopper.intervals import IntervalMask, mask_of
from tilewise.backends.hopper.list_plan import list_arguments
from tilewise.backends.hopper.orders import host_order
from tilewise.backends.hopper.plan import config_of, tiles
from tilewise.backends.hopper.structs import Arguments, Divisor, Plane, PrePostArguments, Rows, Unaligned
from tilewise.hardware.spec import DeviceSpec
from tilewise.problem import Problem


class Step(NamedTuple):
    """One kernel of a plan; its arguments have types in place of addresses; the order is an array of the host."""

    name: str
    kernel: Any
    config: KeysConfig | QueriesConfig
    arguments: Arguments | PrePostArguments
    programs: int


class BackwardPlan(NamedTuple):
    """All of a call that does not depend on its tensors, and the calls made so far."""

    steps: tuple[Step, ...]
    stats: int  # numbers of scratch memory: of the statistics, and of dQ
    dq: int


def make_plan(
    problem: Problem, spec: DeviceSpec, compile_: Any, with_dlse: bool = False, bias: BiasForm | None = None
) -> BackwardPlan:
    """The launches on a device; `compile_(name, dtype, arguments, config)` gives the kernels. `bias`: of a call's own."""
    mask = mask_of(problem)
    planned = {tile.kernel: tile for pass_, tile in tiles(problem, spec).items() if pass_.startswith("backward")}
    configs = {kernel: with_bias_form(config_of(problem, tile), bias) for kernel, tile in planned.items()}
    config = next(config for kernel, config in configs.items() if kernel in ("keys_kernel", "split_kernel"))
    stat_blocks = blocks_of(problem, problem.seqlen_q, config.BLOCK_M)
    stat_tiles = stat_blocks * problem.heads * (1 if problem.varlen else problem.batch)
    around = prepost_arguments(problem, config, stat_blocks, with_dlse)._replace(**prepost_types(problem))

    def step(kernel: str) -> Step:
        own = configs[kernel]
        if kernel in ("preprocess_kernel", "postprocess_kernel"):
            arguments, programs = around, stat_tiles
        else:
            arguments = grad_arguments(problem, mask, own, stat_blocks, spec.units)
            programs = arguments.programs
        return Step(kernel, compile_(kernel, problem.dtype, arguments, own), own, arguments, programs)

    scratch = (stat_tiles + 1) * config.BLOCK_M * config.BLOCK_D if config.REDUCE_DQ else 0
    return BackwardPlan(tuple(step(kernel) for kernel in configs), 2 * stat_tiles * config.BLOCK_M, scratch)


def grad_arguments(
    problem: Problem, mask: IntervalMask, config: KeysConfig | QueriesConfig, stat_blocks: int, processors: int
) -> Arguments:
    """Arguments of a kernel over key tiles, or over query tiles."""
    of_keys = isinstance(config, KeysConfig)
    length, block = (problem.seqlen_k, config.BLOCK_N) if of_keys else (problem.seqlen_q, config.BLOCK_M)
    own_heads = problem.kv_heads if of_keys else problem.heads
    sequences = 1 if problem.varlen else problem.batch
    blocks, heads = blocks_of(problem, length, block), own_heads * sequences
    programs = min(blocks * heads, processors)
    # "*i32": written on the device
    order: Any = "*i32" if mask.listed or config.ORDERED else host_order(problem, mask, config, processors)
    rows = Rows(pointer(problem.dtype), 0, 0, 0) if problem.varlen else None
    return Arguments(
        lse_ptr=None,
        out=None,
        last_q=None,
        last_block=None,
        **tile_arguments(problem, mask, own_heads, blocks, config.BIAS),
        **gradient_types(getattr(config, "DBIAS", ""), config.BIAS),
        stat_blocks=stat_blocks,
        stat_tiles=stat_blocks * problem.heads * sequences,
        total=blocks * heads,
        programs=programs,
        order=order,
        owners="*i32" if config.ORDERED else None,
        scale=gradient_scale(problem),
        stats_ptr="*fp32",
        dq_ptr="*fp32",
        dq=rows,
        dk=rows,
        dv=rows,
        lists=list_arguments(problem, config),
    )


def prepost_arguments(problem: Problem, config: KeysConfig, stat_blocks: int, with_dlse: bool) -> PrePostArguments:
    anywhere = Plane(pointer(problem.dtype), 0, 0, 0, 0)
    return PrePostArguments(
        out=anywhere,
        dout=anywhere,
        dq=anywhere,
        lse_ptr=Unaligned("*fp32"),
        dlse_ptr="*fp32" if with_dlse else None,
        stats_ptr="*fp32",
        dq_ptr="*fp32",
        cu_q="*i32" if problem.varlen else None,
        heads=Divisor.of(problem.heads),
        blocks=Divisor.of(stat_blocks),
        batch=problem.batch,
        len_q=problem.seqlen_q,
        factor=lse_factor(problem, config),
        shift=problem.softcap * LOG2E if capped(problem) else 0.0,
        scale=gradient_scale(problem),
    )


def capped(problem: Problem) -> bool:
    """Is a softcap computed as "cap"? Then scores are less by it, and their gradients by a factor of 4."""
    return problem.softcap > 0 and cap_form(problem) == "cap"


def gradient_scale(problem: Problem) -> float:
    return problem.scale * (4.0 if capped(problem) else 1.0)


def lse_factor(problem: Problem, config: KeysConfig) -> float:
    """By which lse enters the statistics: with a bias scores are in natural units."""
    if problem.bias is not None:
        return 1.0
    return -LOG2E / (problem.scale * LOG2E) if config.ACC_FROM_STATS else LOG2E


def with_bias_form(config: Any, bias: BiasForm | None) -> Any:
    """The config for the bias of a call."""
    if bias is None or not config.BIAS:
        return config
    config = config._replace(BIAS=bias.numbers)
    return config._replace(DBIAS=bias.gradient) if isinstance(config, QueriesConfig) else config
