"""The GPU's tiles, ranked by predicted time.

A backend brings the candidates that its kernels have, each with what it takes on the chip (`judge`, `choose`). Without a backend
the model has its own (`gpu_tile`, `ranked`): what a good kernel would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from tilewise.errors import PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.masks import UNBOUNDED
from tilewise.model import cycles, onchip
from tilewise.model.grid import band_of, bucket, even, grid_fraction, visited_fraction
from tilewise.model.tile import PASSES, TilePlan
from tilewise.problem import Problem

BLOCKS = (16, 32, 64, 128, 256)
MARGIN = 0.03
"""Differences in predicted time that the model is too coarse to trust."""
MODEL_BLOCKS = (16, 32, 64, 128, 192, 256)
"""192 rows exist only for kernels that join accumulators of 128 and 64; others have powers of two."""


@dataclass(frozen=True)
class Candidate:
    """A tile with what the model says of it; `rejected` holds the reason where it cannot run."""

    tile: TilePlan
    on_chip: onchip.OnChip
    step: cycles.StepClocks | None = None
    seconds: float = float("inf")
    waves: float = 0.0
    rejected: str = ""


class Size(NamedTuple):
    """The numbers of a problem that choosing a tile depends on; hashable, so choices are cached."""

    tasks: int
    """Batch × query heads."""
    kv_tasks: int
    rows: int
    keys: int
    d: int
    dv: int
    itemsize: int
    dtype: str
    precision: str
    band: tuple[int, int] | None
    whole: bool = False
    """Must one block see all keys of a row? A bias of -1e9 over a row leaves its log-sum-exp no digits for the number of keys,
    so parts of the row could not be weighed against each other."""

    @property
    def group(self) -> int:
        return self.tasks // self.kv_tasks

    def flops(self, spec: DeviceSpec) -> float:
        return spec.flops(self.dtype, self.precision)

    def step(self, tile: TilePlan, on_chip: onchip.OnChip, spec: DeviceSpec) -> cycles.StepClocks:
        return cycles.step(tile, self.d, self.dv, self.itemsize, self.flops(spec), on_chip, spec)

    def on_chip(self, tile: TilePlan, spec: DeviceSpec) -> onchip.OnChip:
        """The tile's own figures where it has them."""
        return onchip.given(tile) or onchip.kernel(tile, self.d, self.dv, self.itemsize, spec)


def gpu_tile(problem: Problem, spec: DeviceSpec, pass_: str = "forward") -> TilePlan:
    """The tile a GPU kernel should run with by the model.

    Where none fits by the model's count the smallest is returned, because a compiler may still find room for it; `plan`
    raises there.
    """
    candidates = _choose(problem, spec, pass_)
    return (_smallest(candidates) if candidates[0].rejected else candidates[0]).tile


def ranked(problem: Problem, spec: DeviceSpec, pass_: str = "forward", model_blocks: bool = False) -> list[Candidate]:
    """Every candidate, the chosen one on top, then those that run by time; raises if none runs.

    The choice is made for rounded lengths, so that it can be cached; the figures are those of the exact ones.
    """
    candidates = _choose(problem, spec, pass_, model_blocks)
    if candidates[0].rejected:
        small = _smallest(candidates)
        raise PlanError(
            f"tile: none fits {spec.name} for head dims {problem.head_dim}, {problem.head_dim_v} in {problem.dtype}: "
            f"the smallest, {small.tile}, fails: {small.rejected}"
        )
    exact = size_of(problem)
    return [judge(c.tile, exact, spec) for c in candidates]


def _smallest(candidates: tuple[Candidate, ...]) -> Candidate:
    return min(candidates, key=lambda c: (c.on_chip.sram_bytes, c.on_chip.registers))


def _choose(problem: Problem, spec: DeviceSpec, pass_: str, model_blocks: bool = False) -> tuple[Candidate, ...]:
    if pass_ not in PASSES:
        raise PlanError(f"pass_: got {pass_!r}, need one of {', '.join(PASSES)}")
    if not spec.is_gpu:
        raise PlanError(f"device: {spec.name} is a CPU; use cpu_tile for it")
    if not spec.flops(problem.dtype, problem.precision):
        raise PlanError(f"dtype: {spec.name} multiplies no {problem.dtype}, only {', '.join(spec.peak)}")
    return _ranked(size_of(problem, rounded=True), spec, pass_, model_blocks)


def evaluate(problem: Problem, spec: DeviceSpec, tile: TilePlan) -> Candidate:
    """What the model says of one given tile."""
    return judge(tile, size_of(problem), spec, problem)


def size_of(problem: Problem, rounded: bool = False) -> Size:
    problem = even(problem)
    rows, keys, band = max(1, problem.seqlen_q), max(1, problem.seqlen_k), band_of(problem)
    if rounded:
        longer = bucket(keys) - bucket(rows) - (keys - rows)  # a bottom-right band moves with the lengths
        if band is not None and problem.program.structure == "b":
            band = tuple(side if abs(side) >= UNBOUNDED else side + longer for side in band)  # type: ignore[assignment]
        rows, keys = bucket(rows), bucket(keys)
    return Size(
        tasks=max(1, problem.batch * problem.heads),
        kv_tasks=max(1, problem.batch * problem.kv_heads),
        rows=rows,
        keys=keys,
        d=power_of_two(problem.head_dim),
        dv=power_of_two(problem.head_dim_v),
        itemsize=problem.kv_itemsize,  # of keys and values, which are most of it
        dtype=problem.dtype,
        precision=problem.precision,
        band=band,
        whole=problem.bias is not None,
    )


def power_of_two(length: int) -> int:
    """The next power of two of at least 16: head dims are padded to it inside the tile, blocks need not be longer."""
    return max(16, 1 << (length - 1).bit_length())


@lru_cache(maxsize=512)
def _ranked(size: Size, spec: DeviceSpec, pass_: str, model_blocks: bool) -> tuple[Candidate, ...]:
    blocks: tuple[int, ...] = MODEL_BLOCKS if model_blocks else BLOCKS
    return choose([judge(tile, size, spec) for tile in _candidates(size, spec, pass_, blocks)], spec, tier)


def choose(candidates: list[Candidate], spec: DeviceSpec, tier: Callable[[TilePlan], int]) -> tuple[Candidate, ...]:
    """Candidates by tier, then by time, those that cannot run last; on top, of those that the model cannot tell apart, the one
    that moves the fewest bytes.

    The more rows share a K/V tile (the more keys a Q tile, in `backward_dkdv`), the less leaves L2. Tiles that fill the
    register file are not preferred on so small a margin: they may spill.
    """
    # equal times: fewer on-chip bytes, then fewer threads
    ordered = sorted(
        candidates, key=lambda c: (bool(c.rejected), tier(c.tile), c.seconds, c.on_chip.sram_bytes, c.tile.warps)
    )
    best = ordered[0]
    if best.rejected or best.tile.pass_ == "decode":
        return tuple(ordered)
    near = [
        c
        for c in ordered
        if not c.rejected
        and tier(c.tile) == tier(best.tile)
        and c.seconds <= best.seconds * (1 + MARGIN)
        and (c is best or c.on_chip.registers <= 0.9 * spec.max_registers)
    ]
    keys = best.tile.pass_ == "backward_dkdv"
    chosen = max(near, key=lambda c: min(128, c.tile.block_k if keys else c.tile.block_q))
    return chosen, *(c for c in ordered if c is not chosen)


def tier(tile: TilePlan) -> int:
    """0 for tiles worth having, 1 and 2 for those taken only where nothing better fits.

    Narrow tiles double the barriers and the rescaling of the accumulator, a single buffer cannot overlap, warps that
    share rows must exchange P, and sides beyond 128 leave the fragments no registers to spare and the device few blocks
    to balance; what that costs depends on the compiler more than the model can know.
    """
    short, long = sorted((tile.block_q, tile.block_k))
    if tile.pass_ == "decode":
        return int(tile.block_k < 64 or tile.stages < 2)
    if short < 32:
        return 2
    rows = tile.block_k if tile.holds_keys else tile.block_q
    return int(short < 64 or long > 128 or tile.stages < 2 or rows < 16 * tile.warps)


def _candidates(size: Size, spec: DeviceSpec, pass_: str, blocks: tuple[int, ...]) -> Iterator[TilePlan]:
    if pass_ == "decode":
        for block_k in (16, 32, 64, 128):
            for stages in (1, 2, 3, 4):
                yield fitted(TilePlan(16, block_k, stages, 4, pass_="decode"), size, spec)
        return
    for block_q in blocks:
        for block_k in blocks:
            if block_q > power_of_two(size.rows) or block_k > power_of_two(size.keys):
                continue  # a tile more than twice as long as the sequence only multiplies padding
            for warps in (4, 8, 12) if block_q == 192 else (4, 8):
                for stages in (1, 2, 3):
                    yield TilePlan(block_q, block_k, stages, warps, pass_=pass_)


def fitted(tile: TilePlan, size: Size, spec: DeviceSpec) -> TilePlan:
    """A decode tile for few queries: the heads of a group share it, and the keys are split until the device is full."""
    tile = replace(tile, block_q=min(64, power_of_two(size.rows * size.group)), pack_gqa=True)
    return replace(tile, splits=best_splits(tile, size, spec))


def judge(tile: TilePlan, size: Size, spec: DeviceSpec, problem: Problem | None = None) -> Candidate:
    """What the model says of a tile. With the problem its own mask is counted; else one that is not one band counts as full,
    which is fast, and changes no order."""
    on_chip = size.on_chip(tile, spec)
    reason = _obstacle(tile, on_chip, spec)
    if reason:
        return Candidate(tile, on_chip, rejected=reason)
    step = size.step(tile, on_chip, spec)
    if tile.pass_ == "decode":
        seconds, waves = _decode_seconds(tile, size, spec, on_chip, step)
    else:
        visited = visited_fraction(size.band, size.rows, size.keys, *tile.sizes)
        if problem is not None and size.band is None and problem.program.kinds:
            visited = grid_fraction(problem, *tile.sizes, tile.holds_keys)
        seconds, waves = _seconds(tile, size, spec, on_chip, step, visited)
    return Candidate(tile, on_chip, step, seconds, waves)


def _obstacle(tile: TilePlan, on_chip: onchip.OnChip, spec: DeviceSpec) -> str:
    if on_chip.sram_bytes > spec.sram_per_block:
        return f"needs {on_chip.sram_bytes / 1024:.0f} KiB of shared memory, a block has {spec.sram_per_block // 1024}"
    if on_chip.registers > spec.max_registers:
        return f"needs {on_chip.registers} registers a thread, {spec.max_registers} exist: it would spill"
    if on_chip.blocks == 0:
        return f"{tile.warps} warps of {on_chip.registers} registers a thread exceed a unit's registers or threads"
    return ""


def _seconds(
    tile: TilePlan,
    size: Size,
    spec: DeviceSpec,
    on_chip: onchip.OnChip,
    step: cycles.StepClocks,
    visited: tuple[float, float],
) -> tuple[float, float]:
    """Time of the whole grid: a unit's resident blocks advance together; the last wave may be partly empty. `visited`: the part
    of its tiles that a block computes, on average and at most."""
    m, n = tile.block_q, tile.block_k
    rows, cols = -(-size.rows // m), -(-size.keys // n)
    average, longest = visited
    if tile.holds_keys:
        blocks, inner, block_rows = size.kv_tasks * cols, rows * size.group, n
    else:
        blocks, inner, block_rows = size.tasks * rows, cols, m
    resident = min(on_chip.blocks, max(1, -(-blocks // spec.units)))
    slots = spec.units * resident
    waves = blocks / slots
    edge = block_rows * (size.d + size.dv) * size.itemsize
    edge_clocks = cycles.START_CLOCKS + 2 * edge / (spec.l2_bandwidth / (spec.units * spec.clock_hz))
    # `step.total` is one block's part of the unit's time when `resident` blocks interleave
    block_clocks = average * inner * step.total * resident + edge_clocks
    longest_clocks = longest * inner * step.total * resident + edge_clocks
    if average == longest:  # all blocks alike: whole waves
        clocks = -(-blocks // slots) * block_clocks
    else:  # longest first: the tail is about half a block
        clocks = max(longest_clocks, (waves + 0.5) * block_clocks)
    return clocks / spec.clock_hz + spec.launch_s, waves


def _decode_blocks(tile: TilePlan, size: Size) -> int:
    return size.kv_tasks * -(-size.rows * size.group // tile.block_q) * tile.splits


def _decode_seconds(
    tile: TilePlan, size: Size, spec: DeviceSpec, on_chip: onchip.OnChip, step: cycles.StepClocks
) -> tuple[float, float]:
    blocks = _decode_blocks(tile, size)
    slots = spec.units * on_chip.blocks
    cols = -(-size.keys // tile.block_k)
    per_split = -(-cols // tile.splits)
    active = min(blocks, slots)
    resident = -(-active // spec.units)
    moved = tile.block_k * (size.d + size.dv) * size.itemsize
    # a unit cannot draw more than its part of L2's bandwidth, nor all of them together more than DRAM's
    bandwidth = min(spec.dram_bandwidth, min(active, spec.units) * spec.l2_bandwidth / spec.units)
    transfer = moved * active / bandwidth
    compute = step.total * resident / spec.clock_hz
    # the first bytes arrive after the latency; with few stages in flight it is paid again and again
    exposed = cycles.START_CLOCKS / spec.clock_hz / (resident * tile.stages)
    waves = blocks / slots
    full = -(-blocks // slots)
    seconds = full * (cycles.START_CLOCKS / spec.clock_hz + per_split * max(transfer, compute, exposed))
    if tile.splits > 1:
        partial = tile.splits * size.tasks * size.rows * (size.dv + 1) * 4
        seconds += spec.launch_s + 2 * partial / spec.dram_bandwidth
    return seconds + spec.launch_s, waves


def best_splits(tile: TilePlan, size: Size, spec: DeviceSpec) -> int:
    """The fewest parts of the keys that give every unit a block, among those within 2 % of the least predicted time."""
    on_chip = size.on_chip(tile, spec)
    if not on_chip.blocks or not size.flops(spec) or size.whole:
        return 1
    step = size.step(tile, on_chip, spec)
    cols = -(-size.keys // tile.block_k)
    times: dict[int, float] = {}
    for splits in range(1, min(cols, 256) + 1):
        if splits == 1 or -(-cols // splits) < -(-cols // (splits - 1)):  # else no part gets shorter
            times[splits], _ = _decode_seconds(replace(tile, splits=splits), size, spec, on_chip, step)
    blocks = _decode_blocks(tile, size)
    near = [splits for splits, seconds in times.items() if seconds <= 1.02 * min(times.values())]
    return next((splits for splits in near if splits * blocks >= spec.units), near[-1])
