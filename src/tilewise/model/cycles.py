"""How long a unit works on one tile: the clocks of each of its pipes.

Per tile of M × N scores a kernel multiplies matrices (tensor cores), reads their operands (shared memory),
exponentiates (the special-function unit), does the rest of the softmax (fp32 units) and brings in the next tile (from
L2). The pipes run side by side only as far as there is independent work: while one group of four warps multiplies,
another may exponentiate.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.hardware.spec import DeviceSpec
from tilewise.model.onchip import OnChip
from tilewise.model.tile import TilePlan

SHARED_BYTES_PER_CLOCK = 128
FP32_LANES = 128
STEP_CLOCKS = 400
"""What a group of warps waits for in one step whatever its tile: barriers, the tensor pipe's start and end, two
reductions across lanes. Other groups of the unit fill the time."""
START_CLOCKS = 1500
"""From a block's launch to its first product: the latency of the first loads."""

# per score of each pass: products over d and over dv, and fp32 operations; one exponential in all of them
PASS_COSTS = {
    "forward": (1, 1, 3.5),
    "decode": (1, 1, 3.5),
    "backward": (3, 2, 6.5),
    "backward_dkdv": (2, 2, 6.0),
    "backward_dq": (2, 1, 5.0),
}


@dataclass(frozen=True)
class StepClocks:
    """Clocks of one tile step by pipe, for all resident blocks of a unit taken together."""

    tensor: float
    shared: float
    exp: float
    fp32: float
    load: float
    total: float


def tile_flops(pass_: str, m: int, n: int, d: int, dv: int) -> int:
    """FLOPs of the matrix products of one M × N tile."""
    over_d, over_dv, _ = PASS_COSTS[pass_]
    return 2 * m * n * (over_d * d + over_dv * dv)


def step(tile: TilePlan, d: int, dv: int, itemsize: int, flops: float, on_chip: OnChip, spec: DeviceSpec) -> StepClocks:
    """One step of one block, with `on_chip.blocks` blocks sharing the unit; `flops` is the device's rate for the
    dtype."""
    m, n = tile.block_q, tile.block_k
    rate = flops / (spec.units * spec.clock_hz)
    flop = tile_flops(tile.pass_, m, n, d, dv)
    rows = _instruction_rows(spec)
    tensor = flop * (-(-m // rows) * rows / m) / rate
    shared = _shared_bytes(tile, d, dv, itemsize, spec) / SHARED_BYTES_PER_CLOCK
    exp = m * n / (spec.exp_rate / (spec.units * spec.clock_hz))
    accumulator = {"forward": m * dv, "decode": m * dv}.get(tile.pass_, 0)  # rescaled once a step
    fp32 = (PASS_COSTS[tile.pass_][2] * m * n + accumulator) / FP32_LANES
    moved = (m if tile.holds_keys else n) * (d + dv) * itemsize
    load = moved / (spec.l2_bandwidth / (spec.units * spec.clock_hz))
    product, softmax = max(tensor, shared), exp + fp32
    groups = max(1, on_chip.blocks) * max(1, tile.warps // 4)
    # two groups alternate: one multiplies while the other exponentiates, and half of the shorter phase is hidden
    overlapped = max(product, softmax) + min(product, softmax) / min(groups, 2)
    total = max(overlapped, load) if tile.stages > 1 else overlapped + load
    return StepClocks(tensor, shared, exp, fp32, load, total + STEP_CLOCKS / groups)


def _shared_bytes(tile: TilePlan, d: int, dv: int, itemsize: int, spec: DeviceSpec) -> float:
    """Operand bytes the products of one step read from shared memory.

    From Hopper on an instruction covers 64 rows (128 on Blackwell): B is read once for each, A (Q, K or dO, not P and
    dS) once. Before, each warp fetches B for its own rows, at least 16, and A stays in registers.
    """
    m, n = tile.block_q, tile.block_k
    rows = _instruction_rows(spec)
    b_bytes = n * (d + dv) * itemsize * sum(PASS_COSTS[tile.pass_][:2]) / 2
    if rows > 16:
        return -(-m // rows) * b_bytes + m * d * itemsize
    warp_rows = max(16, m // max(1, tile.warps))
    return max(1, m // warp_rows) * b_bytes


def _instruction_rows(spec: DeviceSpec) -> int:
    """Rows of the tensor instruction; smaller tiles are padded to it."""
    return {9: 64, 10: 128}.get(spec.capability[0] if spec.capability else 0, 16)
