"""What the Triton kernels run on a device, and why. Imports neither torch nor triton: a GPU can be planned for anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tilewise.backends.gpu import lists
from tilewise.backends.gpu.operands import dot_precision, in_two, padded, splits_fp32
from tilewise.backends.triton import onchip, tune, tuned
from tilewise.backends.triton.derived import derivative_tiles as derivative_tiles
from tilewise.backends.triton.derived import derives as derives
from tilewise.backends.triton.derived import no_statistics
from tilewise.backends.triton.fixed import KERNELS, fixed, interpreted, merging
from tilewise.backends.triton.onchip import STREAMING, Operands
from tilewise.backends.verdict import Verdict, no_trees
from tilewise.errors import PlanError
from tilewise.hardware.spec import DeviceSpec
from tilewise.model.gpu import MARGIN, Candidate, Size, best_splits, choose, judge, power_of_two, size_of
from tilewise.model.onchip import OnChip, occupancy
from tilewise.model.tile import TilePlan, refusal
from tilewise.problem import DECODE_ROWS, Problem

INVARIANT = True
"""Of pages, that is: `supports` says so."""
DTYPES = ("float16", "bfloat16", "float32")
PRECISIONS = ("default", "tf32")
BLOCKS = (16, 32, 64, 128, 256)
SPAN = 1024
"""Keys of a part with `invariant=True`."""
MOST_HELD = 1 << 28
"""Bytes of partial results that are written for the parts of `invariant=True`; where it would be more, one program has all parts
of a row."""
MOST_ROWS = 2 * DECODE_ROWS
"""Of a tile in decoding. Where there are more rows than DECODE_ROWS their products count as much as what is read."""
SMALL_BLOCKS = (16, 32)
"""For fp32 operands split into fp16 on Blackwell: with 64 rows or more their products go through tensor memory, and triton
3.7.1 asks for 576 columns of it and more where there are 512."""
TOGETHER_UP_TO = 64
"""At larger head dims dK and dV of fp32 are computed apart, five products where together they take four: two accumulators and the
sum of a tile do not fit the registers."""


def supports(problem: Problem, spec: DeviceSpec, *, backward: bool = False) -> Verdict:
    """On a CPU the kernels run in Triton's interpreter."""
    capability = spec.capability
    has = "" if capability is None or capability >= (8, 0) else f"{capability[0]}.{capability[1]}"
    verdict = Verdict.of(
        f"needs compute capability 8.0 or newer, {spec.name} has {has}" if has else None, *obstacles(problem)
    )
    return verdict if not verdict.ok else Verdict.of(*_refusals(problem, spec, backward))


def obstacles(problem: Problem) -> Iterator[str]:
    """Why no device could serve it."""
    if reason := no_statistics(problem):
        yield reason
    if problem.dtype not in DTYPES:
        yield f"dtype {problem.dtype} is not among {', '.join(DTYPES)}"
    if problem.precision not in PRECISIONS:
        yield f"precision={problem.precision!r} is served by cpu and tiled; kernels here sum in float32"
    if problem.invariant and not problem.page:
        yield "has no invariant=True but over pages: the bits of a row depend on the batch around it"
    if reason := (None if problem.page else no_trees(problem.program.kinds)) or lists.too_long(problem):
        yield reason


def declines(problem: Problem, spec: DeviceSpec, *, backward: bool = False) -> str | None:
    return None if spec.is_gpu else "on a CPU it runs in Triton's interpreter, which is for tests"


def passes(problem: Problem, spec: DeviceSpec) -> tuple[str, ...]:
    """The kernels of a call and of its gradients."""
    forward = ("decode", "merge") if (problem.decodes or problem.invariant) and not problem.stats else ("forward",)
    if problem.page:  # a cache has no gradients
        return forward
    return (
        *forward,
        *(("fp16_split",) if splits_fp32(problem, spec.vendor == "AMD") else ()),
        *("backward_preprocess", "backward_dkdv", "backward_dq"),
        *(("backward_dbias",) if problem.bias is not None else ()),
    )


def tiles(problem: Problem, spec: DeviceSpec) -> dict[str, TilePlan]:
    """What runs there, by pass; a pass of which no tile fits is left out, and `supports` says why."""
    plans: dict[str, TilePlan] = {}
    for pass_ in passes(problem, spec):
        if pass_ == "merge" and ("decode" not in plans or plans["decode"].splits == 1):
            continue  # keys that are not split are not merged
        if pass_ in STREAMING and spec.is_gpu and not problem.invariant and _ranking(problem, spec, pass_)[0].rejected:
            continue
        plans[pass_] = tile(problem, spec, pass_)
        if pass_ == "merge":
            plans[pass_] = merging(plans[pass_], problem, plans["decode"].splits)
    return plans


def tile(problem: Problem, spec: DeviceSpec, pass_: str) -> TilePlan:
    """What runs there in one pass; raises where nothing can."""
    asked = problem.asked(pass_)
    if pass_ == "decode" and problem.invariant:
        return invariant(problem, spec)
    if pass_ == "decode" and problem.splits:
        planned = tile(replace(problem, splits=0), spec, pass_)
        return replace(planned, splits=problem.splits, reasons=(f"{problem.splits} parts are yours", *planned.reasons))
    if asked is None:
        return _planned(problem, spec, pass_)
    found = next((tile for tile in _every(problem, spec, pass_) if tile.sizes == asked), None)
    if found is None:
        raise PlanError(next(_refusals(problem, spec, backward=False)))
    return replace(found, source="user", reasons=("yours", *found.reasons[-1:]))


def invariant(problem: Problem, spec: DeviceSpec) -> TilePlan:
    """The tile of `invariant=True`: no length and no number of rows or sequences is among what it follows from, but for the
    number of programs that share the parts of a row, which changes no bits."""
    x, size = _operands(problem, spec, "decode"), size_of(problem, rounded=True)
    longest = 2 if x.stored else 3  # bytes are converted in registers
    sizes = [TilePlan(16, n, stages, 4, pass_="decode") for n in BLOCKS[longest::-1] for stages in (2, 3)]
    if not spec.is_gpu:
        found = interpreted(problem, "decode", (16, 32))
    else:
        tiles = [_judge(_equipped(tile, x, size, spec), x, size, spec) for tile in sizes]
        fitting = [one.tile for one in tiles if not one.rejected]
        if not fitting:
            raise PlanError(f"tile: none of invariant=True fits {spec.name}: {tiles[-1].rejected}")
        found = next((tile for tile in fitting if not onchip.crowded(tile, x, spec)), fitting[-1])
    parts = max(1, -(-problem.seqlen_k // max(1, problem.batch) // SPAN))
    splits = min(found.splits, parts) if held(problem, parts) <= MOST_HELD else 1
    reasons = (f"invariant: parts of {SPAN} keys, whatever the batch is", *found.reasons)
    return replace(found, splits=splits, source="table", reasons=reasons)


def held(problem: Problem, parts: int) -> int:
    """Bytes of so many partial results of each row."""
    return 4 * parts * problem.seqlen_q * problem.heads * problem.head_dim_v


def choices(problem: Problem, spec: DeviceSpec, pass_: str) -> list[TilePlan]:
    """Every tile of a pass, what runs first, the others by predicted time."""
    has = _every(problem, spec, pass_) if pass_ in passes(problem, spec) else []
    asked = problem.asked(pass_)
    if asked in [tile.sizes for tile in has]:
        has = [tile(problem, spec, pass_), *(tile for tile in has if tile.sizes != asked)]
    return has


def _planned(problem: Problem, spec: DeviceSpec, pass_: str) -> TilePlan:
    """What runs unless the user asks for something else: what was measured, else the model's choice."""
    if pass_ not in STREAMING:
        return fixed(problem, spec, pass_)
    if not spec.is_gpu:
        return interpreted(problem, pass_)
    ranking = _ranking(problem, spec, pass_)
    if ranking[0].rejected:
        raise PlanError(f"tile: none of {pass_} fits {spec.name}: {ranking[0].rejected}")
    winner = tune.winner(problem, pass_, spec) if tune.tuning() else None
    if winner is not None:
        return _measured(problem, spec, winner.tile, f"measured here: {winner}")
    entry = tuned.lookup(problem, spec, pass_, _operands(problem, spec, pass_).blocks)
    if entry is None:
        return ranking[0].tile
    sizes = TilePlan(entry.block_q, entry.block_k, 1, entry.warps, pass_=pass_)
    if pass_ == "decode" and entry.block_q < DECODE_ROWS:  # as many rows as there are
        sizes = replace(sizes, block_q=_packed_rows(size_of(problem)))
    sizes = replace(sizes, stages=onchip.stages_of(entry.num_stages, sizes, spec))
    return _measured(problem, spec, sizes, f"tuned: {entry}")


def _measured(problem: Problem, spec: DeviceSpec, sizes: TilePlan, reason: str) -> TilePlan:
    """An exception from the model's choice."""
    size, x = size_of(problem, rounded=True), _operands(problem, spec, sizes.pass_)
    tile = _equipped(sizes, x, size, spec)
    rival = min(_ranking(problem, spec, sizes.pass_), key=lambda candidate: candidate.seconds)
    more = judge(tile, size, spec).seconds / rival.seconds - 1
    told = (f"the model predicts {_full(rival.tile)} to be {more:.1%} faster",) if more > 0 else ()
    return replace(tile, source="tuned", reasons=(reason, *told, *tile.reasons))


def _every(problem: Problem, spec: DeviceSpec, pass_: str) -> list[TilePlan]:
    """The planned tile, then the best of each other size; [] if none fits."""
    if pass_ not in STREAMING:
        return [fixed(problem, spec, pass_)]
    if not spec.is_gpu:
        has = [interpreted(problem, pass_), *(interpreted(problem, pass_, (m, n)) for m in BLOCKS for n in BLOCKS)]
    else:
        has = [candidate.tile for candidate in _ranking(problem, spec, pass_) if not candidate.rejected]
        has = [_planned(problem, spec, pass_), *has] if has else []
    by_size: dict[tuple[int, int], TilePlan] = {}
    for tile in has:
        by_size.setdefault(tile.sizes, tile)
    return list(by_size.values())


def _refusals(problem: Problem, spec: DeviceSpec, backward: bool) -> Iterator[str]:
    """Tiles asked for that there are not, and passes for which none fits."""
    served = passes(problem, spec)
    for pass_, m, n in problem.tile:
        has = _every(problem, spec, pass_) if pass_ in served else []
        if (m, n) not in [tile.sizes for tile in has]:
            yield refusal("triton", pass_, (m, n), has, _why_not(problem, spec, pass_, (m, n)) if has else "")
    for pass_ in served if spec.is_gpu else ():
        if pass_ in STREAMING and pass_.startswith("backward") == backward:
            rejected = _ranking(problem, spec, pass_)[0].rejected
            if rejected:
                dims = f"head dims {problem.head_dim}, {problem.head_dim_v} in {problem.dtype}"
                yield f"no tile of {pass_} fits {spec.name} for {dims}: the smallest {rejected}"


def _why_not(problem: Problem, spec: DeviceSpec, pass_: str, sizes: tuple[int, int]) -> str:
    """Why a kernel that has tiles has not this one."""
    if not all(size in BLOCKS for size in sizes):
        return f"whose sides are powers of two from {BLOCKS[0]} to {BLOCKS[-1]}"
    if not spec.is_gpu or pass_ not in STREAMING:
        return ""
    rejected = [c.rejected for c in _ranking(problem, spec, pass_) if c.tile.sizes == sizes]
    return f"which {rejected[0]}" if rejected else ""


@lru_cache(maxsize=1024)
def _ranked(size: Size, x: Operands, spec: DeviceSpec, pass_: str) -> tuple[Candidate, ...]:
    """Every candidate, the best first, those that cannot run last, the smallest of them first."""
    tiles = [_equipped(tile, x, size, spec) for tile in _candidates(size, x, spec, pass_)]
    judged = [_judge(tile, x, size, spec) for tile in tiles]
    ordered = choose(judged, spec, lambda tile: _tier(tile, x, size, spec)[0])
    best = ordered[0]
    if best.rejected:
        return tuple(sorted(ordered, key=lambda c: (c.on_chip.sram_bytes, c.on_chip.registers)))
    fit = [c for c in ordered if not c.rejected]
    rival = min(fit, key=lambda c: c.seconds)
    of_its_tier = " of its tier" if rival.seconds < best.seconds else ""
    lengths = f"for {size.rows} × {size.keys} (lengths are rounded)"
    told = [f"least predicted time{of_its_tier} among {len(fit)} tiles that fit, {lengths}"]
    if rival.seconds < best.seconds:
        tier, why = _tier(rival.tile, x, size, spec)
        if tier <= _tier(best.tile, x, size, spec)[0]:
            why = f"{MARGIN:.0%} is what the model cannot tell apart, and this one moves fewer bytes"
        told.append(f"{_full(rival.tile)} is predicted {best.seconds / rival.seconds - 1:.1%} faster, but {why}")
    most = _tier(best.tile, x, size, spec)[0]
    others = (_faulty(c, *_tier(c.tile, x, size, spec), most) for c in ordered[1:])
    return replace(best, tile=replace(best.tile, reasons=(*told, *best.tile.reasons))), *others


def _faulty(candidate: Candidate, tier: int, why: str, most: int) -> Candidate:
    """A candidate of a lower tier than the best one's says why."""
    return replace(candidate, tile=replace(candidate.tile, fault=why)) if tier > most else candidate


def _ranking(problem: Problem, spec: DeviceSpec, pass_: str) -> tuple[Candidate, ...]:
    return _ranked(size_of(problem, rounded=True), _operands(problem, spec, pass_), spec, pass_)


def _operands(problem: Problem, spec: DeviceSpec, pass_: str) -> Operands:
    hip, listed, kinds = spec.vendor == "AMD", lists.walks_lists(problem), problem.program.kinds
    split = splits_fp32(problem, hip) and pass_ != "decode"
    plain = not (tuned.features_of(problem) or problem.varlen)
    return Operands(
        d=sum(in_two(problem.head_dim)),
        dv=padded(problem.head_dim_v),
        itemsize=problem.itemsize,
        fp16_split=split,
        tf32x3=dot_precision(problem, hip) == "tf32x3" and not split,
        scratch=4 if problem.dropout_p else 0 if problem.bias is None else problem.itemsize,
        drops=problem.dropout_p > 0,
        several="several" in tuned.features_of(problem),
        ids=listed and any(kind.is_documents for kind in kinds),
        bits=listed and any(kind.is_dense for kind in kinds),
        evaluated=listed and lists.list_layout(problem.program, 16, 16).program,
        blocks=lists.block_sizes(problem.program) if listed else (0, 0),
        paged=problem.page > 0,
        stored=1 if problem.stored else 0,
        in_parts=problem.invariant,
        plain=plain and not problem.stored and problem.program.structure in ("", "b"),
    )


def _candidates(size: Size, x: Operands, spec: DeviceSpec, pass_: str) -> Iterator[TilePlan]:
    blocks = SMALL_BLOCKS if x.fp16_split and spec.capability and spec.capability[0] == 10 else BLOCKS
    if pass_ == "decode":
        wide = x.paged and max(x.d, x.dv) > 256  # latents: 64 rows of them take more than the registers of four warps
        packed = min(DECODE_ROWS, _packed_rows(size)) if wide else _packed_rows(size)
        for block_q in (rows for rows in (16, 32, 64) if wide or rows >= packed) if packed <= DECODE_ROWS else (64, 128):
            for block_k in BLOCKS:
                for stages in (1, 2, 3):
                    for warps in (4, 8) if wide or block_q > DECODE_ROWS else (4,):
                        yield TilePlan(block_q, block_k, stages, warps, pass_=pass_)
        return
    for block_q in blocks:
        for block_k in blocks:
            if block_q > power_of_two(size.rows) or block_k > power_of_two(size.keys):
                continue  # a tile more than twice as long as the sequence only multiplies padding
            for warps in (4, 8):
                for stages in (1, 2, 3) if spec.vendor != "AMD" else (1, 2):
                    yield TilePlan(block_q, block_k, stages, warps, pass_=pass_)


def _packed_rows(size: Size) -> int:
    """Rows of a tile that holds the queries of a group of heads, or many of them: of sequences that share a prefix."""
    return min(MOST_ROWS, power_of_two(size.rows * size.group))


def _equipped(tile: TilePlan, x: Operands, size: Size, spec: DeviceSpec) -> TilePlan:
    """A tile with all that follows from its sizes."""
    sram = onchip.buffers(tile, x, spec)
    needed, registers = onchip.needed_registers(tile, x, spec), onchip.registers(tile, x, spec)
    resident = occupancy(sum(sram.values()), needed, tile.warps * spec.warp, spec)
    streamed = "Q and dO" if tile.pass_ == "backward_dkdv" else "K and V"
    copies = f"{tile.stages} buffers each for {streamed}" if tile.stages > 1 else f"one buffer each for {streamed}"
    tile = replace(
        tile,
        kernel=KERNELS[tile.pass_],
        outer="keys" if tile.pass_ == "backward_dkdv" else "queries",
        on_chip=tuple(sram.items()),
        registers=registers,
        resident=resident,
        reasons=(
            f"{sum(sram.values()) / 1024:.0f} of {spec.sram_per_block // 1024} KiB of shared memory ({copies}), "
            f"{needed} to {registers} registers a thread: {resident} block{'s' * (resident != 1)} a unit",
        ),
    )
    if tile.pass_ == "decode":
        tile = replace(tile, pack_gqa=True, heads=size.group)
        tile = replace(tile, splits=best_splits(tile, size, spec))
    elif x.paged:
        tile = replace(tile, pack_gqa=True, heads=size.group)
    elif tile.pass_ == "backward_dkdv" and _apart(x):
        tile = replace(
            tile, reasons=(*tile.reasons, "dK and dV in a launch each: with both accumulators it would spill")
        )
    return tile


def apart(problem: Problem, spec: DeviceSpec) -> bool:
    """Are dK and dV computed apart, each in a launch of its own?"""
    return _apart(_operands(problem, spec, "backward_dkdv"))


def _apart(x: Operands) -> bool:
    return x.fp16_split and max(x.d, x.dv) > TOGETHER_UP_TO


def _judge(tile: TilePlan, x: Operands, size: Size, spec: DeviceSpec) -> Candidate:
    """What the model says of a tile, or why it cannot run."""
    used, held = tile.on_chip_bytes, onchip.fragments(tile, x, spec)
    most, columns = onchip.most_registers(tile, spec), onchip.tensor_columns(tile, x, spec)
    reason = ""
    if used > spec.sram_per_block:
        reason = f"needs {used / 1024:.0f} KiB of shared memory, a block has {spec.sram_per_block // 1024}"
    elif columns > onchip.TENSOR_COLUMNS:
        reason = f"needs {columns} columns of tensor memory, a unit has {onchip.TENSOR_COLUMNS}"
    elif held > most:
        reason = f"needs {held} registers a thread, {most} exist: it would spill"
    elif not tile.resident:
        reason = f"has too many threads, {tile.warps * spec.warp}"
    if reason:
        return Candidate(tile, OnChip(dict(tile.on_chip), held, 0), rejected=reason)
    return judge(tile, size, spec)


def _tier(tile: TilePlan, x: Operands, size: Size, spec: DeviceSpec) -> tuple[int, str]:
    """0 for tiles worth having, more for those taken only where nothing better fits; and why."""
    faults = dict(_faults(tile, x, size, spec))
    return sum(faults.values()), " and ".join(faults)


def _faults(tile: TilePlan, x: Operands, size: Size, spec: DeviceSpec) -> Iterator[tuple[str, int]]:
    """What speaks against a tile whatever its predicted time, and how much. The model does not see it, as it depends on the
    compiler more than on the device."""
    if onchip.crowded(tile, x, spec):
        yield "it crowds the registers, which may spill within the loop", 5
    if tile.stages < 2:
        yield "it has one buffer: loads are not hidden", 1
    if any(blocks % side for blocks, side in zip(x.blocks, tile.sizes, strict=True)):
        yield "the mask's blocks are not made of whole tiles: it would be evaluated element by element", 4
    if tile.pass_ == "decode":
        if tile.block_q > _packed_rows(size):
            yield "it multiplies padding", 1
        if not 64 <= tile.block_k <= 128:
            yield "it is narrow" if tile.block_k < 64 else "it leaves few blocks to balance the device", 1
        return
    by, rows, (short, long) = onchip.instruction(tile, spec), onchip.held_rows(tile), sorted(tile.sizes)
    if by != onchip.widest(spec):
        yield f"a warpgroup multiplies {onchip.WARPGROUP_ROWS} rows", 2
    wide = 32 if onchip.widest(spec) == "mma" else 64
    if short < wide:
        yield "it is narrow: more barriers and rescaling for the same products", 2 if 2 * short < wide else 1
    if long > 128:
        yield "it leaves few blocks to balance the device", 1
    if onchip.widest(spec) == "mma" and onchip.exchanges(tile, x, spec):
        yield "its warps exchange weights through shared memory", 1
    elif rows < 16 * tile.warps:
        yield "its warps share rows", 1


def _full(tile: TilePlan) -> str:
    return f"{tile} with {tile.stages} buffer{'s' * (tile.stages != 1)} and {tile.warps} warps"
