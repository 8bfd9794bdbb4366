"""Tiles of the Triton kernels by rule: of kernels that pass over rows once, of dBias, and in the interpreter."""

from __future__ import annotations

from dataclasses import replace

from tilewise.backends.gpu.operands import padded
from tilewise.backends.triton import onchip
from tilewise.hardware.spec import DeviceSpec
from tilewise.model.onchip import occupancy
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

KERNELS = {
    "forward": "forward_kernel",
    "decode": "forward_kernel",
    "merge": "merge_kernel",
    "fp16_split": "fp16_split_kernel",
    "backward_preprocess": "prepare_kernel",
    "backward_dkdv": "keys_kernel",
    "backward_dq": "queries_kernel",
    "backward_dbias": "bias_kernel",
}


PARTS, MOST_PARTS = 32, 128
"""Partial results that are merged at a time: more of them in as many pieces of a row."""
TOGETHER = 8
"""Those that are loaded at a time and merged one after the other, where the bits count."""
PIECE = 32
"""Columns of a piece at least: lines of memory are read whole."""


def fixed(problem: Problem, spec: DeviceSpec, pass_: str) -> TilePlan:
    """Kernels that pass over rows once, and the gradient of the bias: a tile by rule."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if pass_ == "backward_dbias":
        return _bias(problem, spec, max(d, dv) * problem.itemsize)
    if pass_ == "merge":
        return _merge(dv, spec, TOGETHER if problem.invariant else 0)
    elif pass_ == "fp16_split":
        rows, width = 32, max(d, dv)
    else:
        rows, width = 64 if spec.is_gpu else 16, dv
    plan = TilePlan(rows, 1, 1, 4, pass_=pass_, source="table", kernel=KERNELS[pass_], reasons=("rows are read once",))
    if not spec.is_gpu:
        return plan
    registers = min(spec.max_registers, 48 + 3 * rows * width // (4 * spec.warp))
    sums = 4 * rows * plan.warps
    resident = occupancy(sums, registers, plan.warps * spec.warp, spec)
    return replace(plan, on_chip=(("sums", sums),), registers=registers, resident=resident)


def _merge(dv: int, spec: DeviceSpec, in_order: int) -> TilePlan:
    """One row of many parts: what takes long is waiting for them, one after the other. `in_order`: so many are on their way
    while as many are merged."""
    plan = TilePlan(1, PARTS, 1, 4, pass_="merge", source="table", kernel=KERNELS["merge"], reasons=("parts are read together",))
    if not spec.is_gpu:
        return plan
    registers = min(spec.max_registers, 48 + 3 * PARTS * dv // (plan.warps * spec.warp))
    sums = 4 * plan.warps * dv + 4 * PARTS if not in_order else 8 * in_order * (dv + 2 * plan.warps)
    resident = occupancy(sums, registers, plan.warps * spec.warp, spec)
    return replace(plan, on_chip=(("sums", sums),), registers=registers, resident=resident)


def merging(plan: TilePlan, problem: Problem, splits: int) -> TilePlan:
    """The tile of the merge for so many parts: twice as many at a time where programs with half a row each take no longer."""
    parts, dv = PARTS, problem.head_dim_v
    while not problem.invariant and parts < min(splits, MOST_PARTS) and dv == padded(dv) >= 2 * PIECE * (parts // PARTS):
        parts *= 2
    return replace(plan, block_k=parts)


def pieces(tile: TilePlan) -> int:
    """Of a row in the merge, a program each."""
    return max(1, tile.block_k // PARTS)


def _bias(problem: Problem, spec: DeviceSpec, width: int) -> TilePlan:
    """The largest tile of dBias that does not spill with its four operands; `width`: the bytes of an operand's row."""
    plan = TilePlan(16, 16, 1, 4, pass_="backward_dbias", source="table", kernel=KERNELS["backward_dbias"])
    if not spec.is_gpu:
        return plan
    by, whole = onchip.widest(spec), problem.itemsize == 4
    if by == "mfma":
        side = 64 if width <= 256 else 32 if width <= 1024 else 16
    elif whole:
        side = 32 if width <= 256 else 16
    else:
        side = 64 if width <= (128 if by == "mma" else 256) else 32 if width <= 256 else 16
        if by == "mma" and (problem.alibi or problem.softcap or problem.dropout_p):
            side = min(side, 32)
    plan = replace(plan, block_q=side, block_k=side, warps=8 if whole and side == 32 else 4)
    by_warpgroups = onchip.instruction(plan, spec) in ("wgmma", "tcgen05")
    sram = {"operands": (4 if by_warpgroups or whole else 2) * side * width}
    sram |= {"barriers": 64} if by_warpgroups else {"dS": max(4096, 4 * side * side)}
    registers = onchip.most_registers(plan, spec)
    resident = occupancy(sum(sram.values()), registers, plan.warps * spec.warp, spec)
    reason = "the largest square that does not spill with the operands of both products"
    return replace(plan, on_chip=tuple(sram.items()), registers=registers, resident=resident, reasons=(reason,))


def interpreted(problem: Problem, pass_: str, sizes: tuple[int, int] | None = None) -> TilePlan:
    """In the interpreter any power of two runs; small ones run soonest."""
    m, n = sizes or (16 if pass_ == "decode" else 32, 32)
    tile = TilePlan(
        m, n, 1, 4, pass_=pass_, source="table", kernel=KERNELS[pass_], reasons=("Triton's interpreter: small tiles",)
    )
    tile = replace(tile, outer="keys" if pass_ == "backward_dkdv" else "queries")
    if pass_ == "decode":
        tile = replace(tile, splits=3 if problem.bias is None else 1, pack_gqa=True, heads=problem.group)
    return tile
