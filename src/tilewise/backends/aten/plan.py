"""What torch's own CPU kernel can do, and where it is the faster one. It chooses its tiles itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.verdict import Verdict, cpu_only, no_statistics, no_tiles
from tilewise.masks.program import UNBOUNDED
from tilewise.problem import WIDE, Problem

if TYPE_CHECKING:
    from tilewise.hardware.spec import DeviceSpec
    from tilewise.model.tile import TilePlan

MATRIX_UNITS = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "bf16"),
    "float16": ("amx_fp16", "avx512_fp16"),
}
"""Instructions without which torch emulates a half-precision product, at a hundredth of the speed."""
FEW_QUERIES = 16
"""Up to so many the keys are read for little work, and what counts is how fast they are read."""


def supports(problem: Problem, spec: DeviceSpec, *, backward: bool = False) -> Verdict:
    lacking = {
        "softcap": problem.softcap > 0,
        "bias": problem.bias is not None,
        "alibi": problem.alibi,
        "sinks": problem.sinks,
        "dropout": problem.dropout_p > 0,
        "packed batches": problem.varlen,
        f"precision={problem.precision!r}": problem.precision in WIDE,
        "negative or zero scale": problem.scale <= 0,
    }
    missing = [name for name, asked in lacking.items() if asked]
    return Verdict.of(
        cpu_only(problem.device),
        f"torch's kernel has no {', '.join(missing)}" if missing else None,
        _mask_obstacle(problem),
        _half_obstacle(problem.dtype, spec),
        _inexact(problem, backward),
        None
        if problem.head_dim == problem.head_dim_v
        else f"torch's kernel needs v as wide as q; head dims are {problem.head_dim} and {problem.head_dim_v}",
        no_tiles("aten", problem.tile, "torch's kernel chooses its own"),
        no_statistics(problem.stats),
    )


def declines(problem: Problem, spec: DeviceSpec, *, backward: bool = False) -> str | None:
    """What is known without a clock; on the live machine the backend measures the rest."""
    if problem.dtype not in MATRIX_UNITS:
        return f"in {problem.dtype} the cpu backend is faster on every machine measured"
    if problem.deterministic:
        return "a clock decides between it and the cpu backend, which would not be the same in every run"
    if problem.dtype == "bfloat16" and spec.has_amx:
        return (
            "the cpu backend multiplies with AMX tiles too, and was 1.1 to 1.6 times as fast with two threads, 1.3 to 2.2 "
            "times with 16 (Xeon with AMX)"
        )
    if problem.seqlen_q <= FEW_QUERIES:
        return "the cpu backend served one query 2.6 times as fast (Xeon with AMX, bf16, 4096 keys, 16 threads)"
    return None


def tiles(problem: Problem, spec: DeviceSpec) -> dict[str, TilePlan]:
    return {}


def choices(problem: Problem, spec: DeviceSpec, pass_: str) -> list[TilePlan]:
    return []


def _half_obstacle(dtype: str, spec: DeviceSpec) -> str | None:
    units = MATRIX_UNITS.get(dtype)
    if units is None or set(units) & set(spec.isa_flags):
        return None
    return f"torch emulates {dtype} products on {spec.name}, which has none of {', '.join(units)}"


def _inexact(problem: Problem, backward: bool) -> str | None:
    if problem.dtype not in MATRIX_UNITS:
        return None
    if backward:
        return f"torch adds up dK and dV in {problem.dtype}, rounding after every block of queries"
    return (
        f"torch's log-sum-exp of {problem.dtype} is inexact, and this caller gets to see it"
        if problem.needs_lse
        else None
    )


def _mask_obstacle(problem: Problem) -> str | None:
    """Only everything, or a triangle whose corners are the corners of the scores."""
    literals = [literal for term in problem.program.terms() for literal in term]
    bands = [x.band(x.shift(problem.shape)) for x in literals if x.kind.is_band and not x.kind.is_offset]
    if not literals or (len(literals) == 1 and bands == [(-UNBOUNDED, 0)]):
        return None
    return "torch's kernel has no mask but the top-left causal triangle"
