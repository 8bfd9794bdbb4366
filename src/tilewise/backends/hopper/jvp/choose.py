"""Which JVPs the kernel serves, and which tile it takes for a problem. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tilewise.backends.hopper.choose import Choice, mask_config, output_columns, unseen_by_all
from tilewise.backends.hopper.config import used_columns
from tilewise.backends.hopper.features import features_of
from tilewise.backends.hopper.intervals import interval_mask, mask_of
from tilewise.backends.hopper.jvp.config import WIDTHS, JvpConfig, tile_for
from tilewise.problem import Problem


class Moving(NamedTuple):
    """Which inputs have a tangent."""

    q: bool = True
    k: bool = True
    v: bool = True


def obstacles(problem: Problem) -> Iterator[str]:
    """Everything but the device that keeps the kernel from the JVP of a problem whose forward and backward are served."""
    mask = interval_mask(problem.program, problem.seqlen_q, problem.seqlen_k, problem.varlen)
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > WIDTHS[-1]:
        yield f"jvp: head dims up to {WIDTHS[-1]}, found {widest}"
    if isinstance(mask, str):
        yield f"jvp: {mask}"
    if problem.softcap > 0:
        yield "jvp: softcap is not served here"
    yield from (f"jvp: {name} is not served here" for name in features_of(problem))
    if problem.origins:
        yield "jvp: positions of a part of a whole are not known to its kernel"


def planned_tile(problem: Problem) -> JvpConfig:
    return tile_for(problem.head_dim, problem.head_dim_v)


def jvp_choice(problem: Problem, moving: Moving = Moving()) -> Choice:
    """What the kernel is compiled for where these inputs move, and why."""
    mask = mask_of(problem)
    tile = planned_tile(problem)
    config = tile._replace(
        Q_T=moving.q,
        K_T=moving.k,
        V_T=moving.v,
        QK_COLUMNS=used_columns(problem.head_dim, tile.BLOCK_D),
        V_COLUMNS=output_columns(problem.head_dim_v, tile.BLOCK_DV),
        TAIL=not mask.terms and problem.seqlen_k % tile.BLOCK_N > 0,
        UNSEEN_KEYS=unseen_by_all(problem, mask),
        SCORES="fold" if problem.scale > 0 else "scale",
        **mask_config(problem, mask),
    )
    return Choice(config, f"two accumulators and two tiles of scores leave registers for {tile.BLOCK_N} keys")
