"""Shared memory and registers of the Triton kernels as Triton 3.7 lays them out: `make compile-matrix` asks the compiler.

Which instruction multiplies decides most of it. A warp's own (`mma`) takes both operands from registers: weights that another
warp needs pass through shared memory. Those of a warpgroup (`wgmma`) and of tensor memory (`tcgen05`) read tiles where they lie,
and keep them in use a step longer. For AMD's (`mfma`) what is loaded once, and the tile in flight, lie in registers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tilewise.hardware.spec import DeviceSpec
from tilewise.model.tile import TilePlan
from tilewise.problem import MAX_HEAD_DIM

BARRIERS = 1152
"""Of tensor maps and of tensor memory, with what an alignment to 1024 bytes leaves empty."""
STREAMING = ("forward", "decode", "backward_dkdv", "backward_dq")
"""Passes that hold one side and stream the other; the others read their rows once."""
WARPGROUP_ROWS = 64
WARPGROUPS_EXCHANGE = 4096
"""Bytes through which two warpgroups exchange parts of weights."""
STATISTICS = 4
"""Bytes of an LSE, a delta, or the scale of a token."""
OVERHEAD = 24
"""Registers for addresses, statistics and loop state."""
AHEAD = 48
"""Registers in which the assembler keeps what it has computed ahead for an mma."""
REGISTER = 4
TENSOR_COLUMNS = 512
"""Tensor memory of a Blackwell multiprocessor."""
CROWDED = {
    "mma": 288, "scratch": 240, "several": 200, "dropped keys": 190, "evaluated": 150,
    "exchange": 160, "split exchange": 128, "wgmma": 184, "wide": 126, "tf32x3": 4096,
}  # fmt: skip
"""Beyond these registers of a thread (tf32x3: numbers of a streamed tile) the assembler of CUDA 13.1 spills within loops: with an
mma, with one beside a bias or dropout, beside several features, with one of dK and dV under dropout, whose random words are drawn
beside two sums, with one of gradients under a mask that is evaluated, with one whose weights are exchanged, that in two parts,
with a wgmma, and with one of many columns."""


class Operands(NamedTuple):
    """What the tiles of a problem hold."""

    d: int
    """Head dims as tiles have them: powers of two."""
    dv: int
    itemsize: int
    fp16_split: bool = False
    """fp32 as two fp16 parts, with a scale for each token."""
    tf32x3: bool = False
    """fp32 whose rest beyond tf32 is multiplied, too."""
    scratch: int = 0
    """Bytes for each score that change their layout on the way: of a bias, or of what dropout keeps."""
    drops: bool = False
    """There is dropout."""
    several: bool = False
    """Two or more of a bias, ALiBi, a softcap and dropout."""
    ids: bool = False
    """Ids of documents stream past with the operands."""
    bits: bool = False
    """Packed bits of a dense mask do."""
    evaluated: bool = False
    """The mask has no form that kernels know: tables and dense masks are read element by element."""
    blocks: tuple[int, int] = (0, 0)
    """Queries and keys of the blocks of the mask's tables, by which they can be divided; (0, 0): no tables."""
    paged: bool = False
    """K and V lie in pages: a tile has the queries of all heads of a group."""
    stored: int = 0
    """Bytes of a number of K and V, where these are narrower than Q."""
    in_parts: bool = False
    """Results of parts are written within the loop."""
    plain: bool = True
    """No feature or mask that takes more registers than counted here."""


def held_rows(tile: TilePlan) -> int:
    """Rows of the side that a block holds, which are those of its products."""
    return tile.block_k if tile.pass_ == "backward_dkdv" else tile.block_q


def widest(spec: DeviceSpec) -> str:
    """The device's largest matrix instruction: mma, wgmma, tcgen05 or mfma."""
    if spec.vendor == "AMD":
        return "mfma"
    return {9: "wgmma", 10: "tcgen05"}.get(spec.capability[0] if spec.capability else 0, "mma")


def instruction(tile: TilePlan, spec: DeviceSpec) -> str:
    """The one that a tile is multiplied with."""
    by = widest(spec)
    return by if by == "mfma" or held_rows(tile) >= WARPGROUP_ROWS else "mma"


def num_stages(tile: TilePlan, spec: DeviceSpec) -> int:
    """What Triton is asked for, so that `tile.stages` buffers exist: for mma it counts the tile that is in registers, too."""
    return tile.stages + (tile.pass_ in STREAMING and instruction(tile, spec) == "mma")


def stages_of(asked: int, tile: TilePlan, spec: DeviceSpec) -> int:
    """The other way round: buffers for a `num_stages` of Triton."""
    return max(1, asked - 1) if instruction(tile, spec) == "mma" else asked


def exchanges(tile: TilePlan, x: Operands, spec: DeviceSpec) -> bool:
    """Do warps exchange their weights through shared memory?

    Triton divides the output of an mma that is wider than high among the warps by columns: each needs the weights of all rows.
    Two parts of weights are exchanged by a wgmma, too, where there are more warps than 16 rows for each.
    """
    by, rows = instruction(tile, spec), held_rows(tile)
    width = {"backward_dkdv": max(x.d, x.dv), "backward_dq": x.d}.get(tile.pass_, x.dv)
    shared = by == "wgmma" and x.fp16_split and rows < 16 * tile.warps
    return by == "mfma" or shared or (by == "mma" and rows < width)


def buffers(tile: TilePlan, x: Operands, spec: DeviceSpec) -> dict[str, int]:
    """Bytes of shared memory by buffer."""
    m, n = tile.block_q, tile.block_k
    q, k, v, do = m * x.d * x.itemsize, n * x.d * x.itemsize, n * x.dv * x.itemsize, m * x.dv * x.itemsize
    if x.stored:
        k, v = n * x.d * x.stored, n * x.dv * x.stored
    by = instruction(tile, spec)
    if tile.pass_ == "backward_dkdv":
        once, streamed = {"K": k, "V": v}, {"Q": q, "dO": do}
    elif tile.pass_ == "backward_dq":
        once, streamed = {"Q": q, "dO": do}, {"K": k, "V": v}
    else:
        once, streamed = {"Q": q}, {"K": k, "V": v}
    result = {} if by == "mfma" else once
    result |= _streams(tile, streamed, by)
    if by != "mfma":
        held = tile.stages if by == "mma" else tile.stages - 1
        if tile.pass_ == "backward_dkdv":
            result["LSE, delta"] = 2 * held * m * STATISTICS
        if x.fp16_split:
            result["scales"] = 2 * held * (m if tile.pass_ == "backward_dkdv" else n) * STATISTICS
        if x.stored:
            result["scales"] = 2 * tile.stages * n * STATISTICS
        if x.ids and by == "mma":
            result["ids"] = held * (m if tile.pass_ == "backward_dkdv" else n) * STATISTICS
        if x.evaluated or any(blocks % side for blocks, side in zip(x.blocks, tile.sizes, strict=True)):
            ahead = held if by == "mma" and tile.pass_ in ("forward", "decode") else 1  # where the mask is loaded ahead, too
            result["mask"] = 2 * ahead * m * n
        elif x.bits:
            result["bits"] = (held if by == "mma" else 1) * m * n // 8
    elif x.evaluated and tile.pass_ in ("forward", "decode"):
        result["mask"] = 2 * m * n
    if exchanges(tile, x, spec):
        weights = "P" if tile.pass_ in ("forward", "decode") else "dS"
        result[weights] = WARPGROUPS_EXCHANGE if by == "wgmma" else m * n * x.itemsize
    if x.in_parts and x.d <= MAX_HEAD_DIM:  # through the same memory; of latents, V's buffers are counted and not there
        result["P"] = max(result.get("P", 0), 4 * m * x.dv)
    if x.tf32x3:
        result |= {name: 2 * result[name] for name in ("Q", "dO", "P", "dS") if name in result}
    if x.scratch:
        result["scratch"] = m * n * x.scratch
    if spec.capability is not None and spec.capability[0] in (9, 10):
        result["barriers"] = BARRIERS
    if by == "mfma":  # what is loaded once passes through the same memory before the loop, one after the other
        missing = max(once.values()) - sum(result.values())
        result |= {"before the loop": missing} if missing > 0 else {}
    return result


def _streams(tile: TilePlan, streamed: dict[str, int], by: str) -> dict[str, int]:
    """Buffers of the two operands that stream past."""
    if tile.stages == 1 and by != "mma" and (by == "mfma" or tile.pass_ in ("forward", "decode")):
        return {" or ".join(streamed): max(streamed.values())}  # the second comes when the first is done with
    if by == "mfma":  # one tile of each; the next is in registers
        return streamed
    sizes = {name: tile.stages * size for name, size in streamed.items()}
    if by == "tcgen05" and tile.pass_ not in ("forward", "decode"):
        # what the last product of a step reads is in use a step longer
        late = ("Q", "dO") if tile.pass_ == "backward_dkdv" else ("K",)
        sizes |= {name: (tile.stages + 1) * streamed[name] for name in late}
    return sizes


def fragments(tile: TilePlan, x: Operands, spec: DeviceSpec) -> int:
    """Registers of a thread for what it holds at the fullest: accumulators, scores, and the resident operand of an mma."""
    m, n, threads = tile.block_q, tile.block_k, tile.warps * spec.warp
    sums = {"backward_dkdv": n * (x.d + x.dv), "backward_dq": m * x.d}.get(tile.pass_, m * x.dv)
    if x.fp16_split:  # each tile is summed apart
        sums += {"backward_dkdv": n * max(x.d, x.dv), "backward_dq": m * x.d}.get(tile.pass_, m * x.dv)
    forward = tile.pass_ in ("forward", "decode")
    scores = m * n * (1 if forward else 2)
    narrow = m * n * x.itemsize * (2 if tile.pass_ == "backward_dkdv" else 1)
    held = 0
    if instruction(tile, spec) == "mma" and not exchanges(tile, x, spec):
        held = max(held_rows(tile), 16 * tile.warps) * (x.d if forward else x.d + x.dv) * x.itemsize
    return -(-(4 * (sums + scores) + narrow + held) // (REGISTER * threads)) + OVERHEAD


def loaded_ahead(tile: TilePlan, x: Operands, spec: DeviceSpec) -> int:
    """Registers of a thread for a whole streamed tile, which the assembler likes to load before the products of an mma."""
    if instruction(tile, spec) != "mma":
        return 0
    length = tile.block_q if tile.pass_ == "backward_dkdv" else tile.block_k
    among = tile.warps if exchanges(tile, x, spec) else 1
    return length * max(x.d, x.dv) * x.itemsize // (REGISTER * spec.warp * among)


def needed_registers(tile: TilePlan, x: Operands, spec: DeviceSpec) -> int:
    """Registers of a thread without which a kernel gets slow or spills; the assembler takes more if it may."""
    return min(most_registers(tile, spec), fragments(tile, x, spec) + loaded_ahead(tile, x, spec))


def crowded(tile: TilePlan, x: Operands, spec: DeviceSpec) -> bool:
    """Are registers so few that values may wait in memory within the loops? The limits are where that was seen to begin."""
    by, held = instruction(tile, spec), fragments(tile, x, spec)
    if by != "mma":
        simple = tile.pass_ in ("forward", "decode") and not x.fp16_split
        wide = by == "wgmma" and max(x.d, x.dv) > (256 if simple else 128)
        return held > CROWDED.get("wide" if wide else by, spec.max_registers)
    if x.tf32x3:
        return tile.block_k * max(x.d, x.dv) > CROWDED["tf32x3"]
    if exchanges(tile, x, spec) and x.fp16_split:  # dK and dV, of which one is missing in each launch, take more
        return held * math.sqrt(tile.warps / 4) > CROWDED["split exchange"] * (
            1.2 if tile.pass_ == "backward_dkdv" else 1
        )
    if exchanges(tile, x, spec):
        return held > CROWDED["exchange"]
    kind = "several" if x.several else "scratch" if x.scratch else "mma"
    if x.drops and tile.pass_ == "backward_dkdv":
        kind = "dropped keys"
    if x.evaluated and tile.pass_.startswith("backward"):
        kind = "evaluated"
    return held + loaded_ahead(tile, x, spec) > CROWDED[kind]


def most_registers(tile: TilePlan, spec: DeviceSpec) -> int:
    """What a thread can have where a unit holds one block."""
    return min(spec.max_registers, spec.register_bytes // (REGISTER * tile.warps * spec.warp))


def tensor_columns(tile: TilePlan, x: Operands, spec: DeviceSpec) -> int:
    """Columns of tensor memory: fp32 sums and scores, and the weights at half their width."""
    if instruction(tile, spec) != "tcgen05":
        return 0
    scores = tile.block_q if tile.pass_ == "backward_dkdv" else tile.block_k
    sums = {"backward_dkdv": x.d + x.dv, "backward_dq": x.d}.get(tile.pass_, x.dv)
    both = {"backward_dkdv": 3 * scores, "backward_dq": 5 * scores // 2}.get(tile.pass_, 3 * scores // 2)
    return (sums + both) * -(-held_rows(tile) // 128)


def registers(tile: TilePlan, x: Operands, spec: DeviceSpec) -> int:
    """Registers of a thread: at most so many are used. The assembler takes what it can get."""
    by, held = instruction(tile, spec), fragments(tile, x, spec)
    most = limit = most_registers(tile, spec)
    if x.plain and x.itemsize == 2:
        if by == "mma" and tile.pass_ != "backward_dkdv" and not exchanges(tile, x, spec):
            most = held + loaded_ahead(tile, x, spec) + AHEAD
        elif by == "wgmma":
            most = int(1.2 * held + 0.75 * max(x.d, x.dv))
    return min(limit, -(-max(most, held) // 8) * 8)
