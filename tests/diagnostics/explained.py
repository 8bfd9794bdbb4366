"""Random problems for what is explained beside what is launched."""

from __future__ import annotations

import random
from dataclasses import replace

import tilewise as tw
from tilewise.backends import plans
from tilewise.backends.gpu.record import Launch
from tilewise.backends.hopper.structs import PrePostArguments
from tilewise.hardware import DeviceSpec
from tilewise.problem import Problem


def drawn(seed: int, backend: str, spec: DeviceSpec) -> Problem:
    """A random problem, every second one with a tile that some kernel has."""
    rng = random.Random(seed)
    kv_heads, queries = rng.choice((1, 2)), rng.choice((1, 64, 300, 2048))
    problem = Problem.of(
        batch=rng.choice((1, 3)), heads=kv_heads * rng.choice((1, 4)), kv_heads=kv_heads, seqlen=queries,
        kv_seqlen=rng.choice((queries, 1000)), head_dim=rng.choice((64, 96, 128, 256)), device="cuda",
        dtype=rng.choice(("float16", "bfloat16")), mask=rng.choice((tw.full(), tw.causal(), tw.window(100))),
    )  # fmt: skip
    if seed % 2:
        offers = {pass_: plans.choices(backend, problem, spec, pass_) for pass_ in plans.tiles(backend, problem, spec)}
        pass_, tiles = rng.choice([(pass_, tiles) for pass_, tiles in offers.items() if len(tiles) > 1] or [("", [])])
        problem = replace(problem, tile=((pass_, *rng.choice(tiles).sizes),)) if tiles else problem
    return problem


def streams(launch: Launch) -> bool:
    """Does its kernel walk over keys, queries or parts, tile by tile? While launches are collected, Hopper's have no kernel."""
    walks = ("forward_kernel", "merge_kernel", "keys_kernel", "queries_kernel")
    return not isinstance(launch.args[-1], PrePostArguments) and getattr(launch.kernel, "__name__", walks[0]) in walks


def sizes_of(launches: list[Launch]) -> list[tuple[int, int]]:
    """The tiles of the launches that walk."""
    return [(launch.config.BLOCK_M, launch.config.BLOCK_N) for launch in launches if streams(launch)]
