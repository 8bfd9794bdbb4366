"""What the Hopper kernels serve on a device, and with which tiles: all that needs neither tensors nor this machine.

The launches are made from `tiles` and `config_of`, and from no other place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

from tilewise.backends.hopper.backward.choose import (
    keys_choices,
    listed_tiles,
    queries_choices,
    separate_dq,
    without_mask,
)
from tilewise.backends.hopper.backward.config import QUERIES, widths
from tilewise.backends.hopper.choose import Choice, forward_choices
from tilewise.backends.hopper.compiler import newer_registers
from tilewise.backends.hopper.config import WIDTHS, tiles_for
from tilewise.backends.hopper.features import feature_obstacles, slow_feature, statistics_obstacle
from tilewise.backends.hopper.intervals import interval_mask, mask_of
from tilewise.backends.hopper.jvp import choose as jvp
from tilewise.backends.hopper.jvp.shared_memory import on_chip as jvp_on_chip
from tilewise.backends.hopper.limits import why_not
from tilewise.backends.hopper.list_plan import list_arguments, list_obstacle
from tilewise.backends.hopper.orders import work_order
from tilewise.backends.hopper.shared_memory import on_chip, warps_of
from tilewise.backends.verdict import Verdict, no_trees
from tilewise.hardware.spec import DeviceSpec
from tilewise.model.tile import OrderOf, TilePlan, refusal
from tilewise.problem import Problem

DTYPES = ("float16", "bfloat16")
FORWARD, GRADIENTS = ("forward", "decode", "merge"), ("backward", "backward_dkdv", "backward_dq")
KERNELS = {
    "forward": "forward_kernel",
    "backward_preprocess": "preprocess_kernel",
    "backward": "keys_kernel",
    "backward_dkdv": "keys_kernel",
    "backward_dq": "queries_kernel",
    "backward_postprocess": "postprocess_kernel",
    "jvp": "jvp_kernel",
}


def supports(problem: Problem, spec: DeviceSpec, *, backward: bool = False) -> Verdict:
    """Can the kernels compute this problem there? Names every obstacle."""
    known = None if spec.capability == (9, 0) else f"needs compute capability 9.0, {spec.name} is {spec.arch}"
    return Verdict.of(known, *obstacles(problem, backward))


def obstacles(problem: Problem, backward: bool = False) -> list[str]:
    """Everything but the device that keeps the kernels from a problem."""
    precise = problem.precision not in ("default", "tf32")
    mask = interval_mask(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
    reasons = (
        None if problem.dtype in DTYPES else f"dtype {problem.dtype} is not among {', '.join(DTYPES)}",
        *feature_obstacles(problem, backward),
        f"precision={problem.precision!r} is not served here" if precise else None,
        *(dim_reason(name, getattr(problem, name)) for name in ("head_dim", "head_dim_v")),
        list_obstacle(problem, backward, tile_sizes(problem, backward)) if isinstance(mask, str) else None,
        statistics_obstacle(problem, backward),
        no_trees(problem.program.kinds),
        "its kernels read no pages; triton's do" if problem.page else None,
    )
    return [reason for reason in reasons if reason] or [*refused_tiles(problem, backward)]


def tile_sizes(problem: Problem, backward: bool) -> list[tuple[int, int]]:
    """Tiles for lists: of the forward, one of which must do, or those of the backward's kernels, all of which must."""
    if any(dim_reason(name, getattr(problem, name)) for name in ("head_dim", "head_dim_v")):
        return []
    if backward:
        queries = QUERIES[widths(problem.head_dim, problem.head_dim_v)]
        return [(tile.BLOCK_M, tile.BLOCK_N) for tile in (*listed_tiles(problem), queries)]
    tiles = tiles_for(problem.head_dim, problem.head_dim_v)
    return [(tile.BLOCK_M, tile.BLOCK_N) for tile in tiles if tile.WARPGROUPS == 2]


def declines(problem: Problem, spec: DeviceSpec | None = None, *, backward: bool = False) -> str | None:
    if problem.decodes:
        rows = problem.seqlen_q * problem.group
        return f"{rows} rows would leave most of a tile empty; split keys serve so few queries better"
    return slow_feature(problem, backward)


def derives(problem: Problem, spec: DeviceSpec, *, derivative: str) -> Verdict:
    """Has it this derivative of a problem whose backward it supports?"""
    return Verdict.of(*derivative_obstacles(problem, derivative))


def derivative_obstacles(problem: Problem, derivative: str) -> list[str]:
    """Everything that keeps the kernels from a derivative of a problem whose backward they serve."""
    return [f"hopper has no {derivative}"] if derivative != "jvp" else [*jvp.obstacles(problem)]


def derivative_tiles(problem: Problem, spec: DeviceSpec, derivative: str) -> dict[str, TilePlan]:
    """The tile of a JVP that is served, where all of q, k and v move."""
    return {"jvp": offers(problem, "jvp")[0].tile} if derivative == "jvp" else {}


def tiles(problem: Problem, spec: DeviceSpec) -> dict[str, TilePlan]:
    """What runs there, by pass: for a problem that is supported."""
    return {pass_: planned.tile for pass_, planned in plan_of(problem).items()}


def choices(problem: Problem, spec: DeviceSpec, pass_: str) -> list[TilePlan]:
    """Every tile that the kernel of a pass has for the problem, the planned one first; [] if there is no such kernel."""
    return [planned.tile for planned in offers(problem, pass_)]


def config_of(problem: Problem, tile: TilePlan) -> Any:
    """What the kernel of a planned tile is compiled for."""
    return next(planned.config for planned in offers(problem, tile.pass_) if planned.tile == tile)


class Planned(NamedTuple):
    """A tile, and what its kernel is compiled for."""

    tile: TilePlan
    config: Any


def plan_of(problem: Problem) -> dict[str, Planned]:
    """The tile of each pass that runs, in order."""
    separate = separate_dq(problem, mask_of(problem)).config
    two = ("backward_dkdv", "backward_dq")
    passes = ("forward", "backward_preprocess", *(two if separate else ("backward", "backward_postprocess")))
    return {pass_: offers(problem, pass_)[0] for pass_ in passes}


def offers(problem: Problem, pass_: str) -> list[Planned]:
    """Every tile of a pass with its config; the one asked for first, or else the usual one. Kept with the problem."""
    key = ("hopper", pass_)
    if key not in problem.memory:
        asked = problem.asked(pass_)
        found = [described(problem, pass_, *choice) for choice in configs(problem, pass_)]
        found.sort(
            key=lambda planned: planned.tile.sizes != asked
        )  # stable: without one asked for the usual one stays first
        problem.memory[key] = found
    return problem.memory[key]  # type: ignore[no-any-return]


def configs(problem: Problem, pass_: str) -> list[Choice]:
    """What the kernel of a pass can be compiled for, with the reasons, the usual one first."""
    if pass_ == "forward":
        return forward_choices(problem, newer_registers())
    if pass_ in ("backward", "backward_dkdv"):
        return keys_choices(problem, pass_ == "backward_dkdv")
    if pass_ == "jvp":
        return [] if any(jvp.obstacles(problem)) else [jvp.jvp_choice(problem)]
    if pass_ not in KERNELS:
        return []
    separate = separate_dq(problem, mask_of(problem)).config
    keys = offers(problem, "backward_dkdv" if separate or pass_ == "backward_dq" else "backward")[0].config
    if pass_ == "backward_dq":
        return queries_choices(problem, keys.BLOCK_M)
    return [Choice(without_mask(keys), f"{keys.BLOCK_M} queries at a time, as the kernel that holds keys takes them")]


def described(problem: Problem, pass_: str, config: Any, reason: str) -> Planned:
    """A config as a tile."""
    asked = problem.asked(pass_) == (config.BLOCK_M, config.BLOCK_N)
    around = pass_ in ("backward_preprocess", "backward_postprocess")
    kernel = "split_kernel" if getattr(config, "SPLIT", False) and not around else KERNELS[pass_]
    stages = {"forward": "KV_STAGES", "jvp": "KV_STAGES", "backward_dq": "K_STAGES"}.get(pass_, "Q_STAGES")
    tile = TilePlan(
        block_q=config.BLOCK_M,
        block_k=1 if around else config.BLOCK_N,
        stages=1 if around else getattr(config, stages),
        warps=4 if around else warps_of(config),
        pass_=pass_,
        source="user" if asked else "table",
        kernel=kernel,
        outer="keys" if pass_ in ("backward", "backward_dkdv") else "queries",
        on_chip=bytes_of(problem, kernel, config),
        registers=0 if around else config.REGISTERS[0],
        resident=0 if around else 1,
        persistent=not around,
        order=None if around or pass_ == "jvp" else _order_of(config),
        reasons=("asked for" if asked else reason,),
    )
    return Planned(tile, config)


@lru_cache(maxsize=256)
def _order_of(config: Any) -> OrderOf:
    """The same for the same config, so that the model knows it again."""
    return partial(work_order, config)


def bytes_of(problem: Problem, kernel: str, config: Any) -> tuple[tuple[str, int], ...]:
    """Shared memory of a kernel by buffer."""
    if kernel == "jvp_kernel":
        return jvp_on_chip(config, mask_of(problem))
    return on_chip(kernel, config, mask_of(problem), list_arguments(problem, config))


def refused_tiles(problem: Problem, backward: bool) -> Iterator[str]:
    """A sentence for each tile that was asked for and does not exist."""
    asked = {pass_: (m, n) for pass_, m, n in problem.tile}
    if backward and "backward" in asked and len(asked.keys() & {"backward_dkdv", "backward_dq"}):
        yield "tile: backward is one kernel for all gradients, backward_dkdv and backward_dq are two; name either"
        return
    for pass_, pair in asked.items():
        if (pass_ in FORWARD and not backward) or (pass_ not in FORWARD and backward):
            has = [planned.tile for planned in offers(problem, pass_)] if pass_ in (*GRADIENTS, "forward", "jvp") else []
            if pair not in [tile.sizes for tile in has]:
                yield refusal("hopper", pass_, pair, has, why_not(problem, pass_, pair))


def dim_reason(name: str, dim: int) -> str | None:
    if dim > WIDTHS[-1]:
        return f"{name} {dim} is over {WIDTHS[-1]}"
    return f"{name} {dim} is not a multiple of 8" if dim % 8 else None
