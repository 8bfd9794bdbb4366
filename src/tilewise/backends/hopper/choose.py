"""Which of its tiles the forward kernel takes for a problem, and what it is compiled for: the one place that decides."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.gpu.lists import list_layout
from tilewise.backends.hopper.config import NARROW, Config, tiles_for, used_columns
from tilewise.backends.hopper.features import alibi_form, bias_form, drawn_apart, in_quads, statistics_form
from tilewise.backends.hopper.intervals import IntervalMask, mask_of, unseen_keys
from tilewise.backends.hopper.list_plan import hides_in_tiles
from tilewise.backends.hopper.tile_order import OVERHEAD_KEYS, visited_keys
from tilewise.problem import Problem

OVERHEAD_WIDE = 165
"""What a tile of 192 queries costs beside its keys, in keys (OVERHEAD_KEYS: one of 128)."""
OVERHEAD_MASKED = 240
"""The same for 192 queries under a mask whose rows end early: they pass its edge in steps that fit 192 queries worse."""
NARROW_SPEED = 0.87
"""Two warpgroups against three at head dim 64, long rows (H200, causal 16k keys: 473 and 525 TFLOP/s, 0.90). A little less puts
the crossover under a causal mask between 2k keys, where two are 4 % faster, and 8k, where three are by 10 %."""
SHORT_KEYS = 512
"""Under a mask whose rows end early, query tiles with fewer keys than this on average take them 64 at a time (H200, causal:
S 512 5 and 13 % faster at head dims 128 and 64, S 2048 12 % slower)."""
NARROWER = 96
THREE_GAIN = 1.07
"""Between 64 and 96 columns three warpgroups of 64 keys are faster than two in turns by more than this (H200, causal 8k, beside
FlashAttention-4's 677 and 632 µs: d 96 647 for 688 µs, d 80 598 for 657), so their tiles may hold as much more."""
RELEASE_EARLY_KEYS = 2048
"""Up to so many keys the queries' stage is released early without a mask too (H200, head dim 256: S 512 and 2048 0.5 to
1 % faster, 8192 and 16384 1 % slower; causal 0.5 to 2 % faster at all four)."""


class Choice(NamedTuple):
    """A tile of a kernel, compiled for the problem, and why it is taken."""

    config: Any
    reason: str


def forward_choices(problem: Problem, newer: bool) -> list[Choice]:
    """Every tile the kernel has for the problem, the one it takes first; `newer`: see `compiler.newer_registers`."""
    mask = mask_of(problem)
    if mask.listed:
        return listed_choices(problem, newer)
    unseen = unseen_by_all(problem, mask)
    tiles = [
        tile
        for tile in tiles_for(problem.head_dim, problem.head_dim_v)
        if not shortage(tile, mask, unseen, newer, crowded(problem) or problem.softcap > 0)
    ]
    first, reason = planned(problem, mask, tiles)
    others = [Choice(tile, "asked for") for tile in tiles if tile is not first]
    return [
        Choice(compiled_for(problem, mask, unseen, tile, newer), why) for tile, why in (Choice(first, reason), *others)
    ]


def listed_choices(problem: Problem, newer: bool) -> list[Choice]:
    """The tiles of two warpgroups for which PARTIAL tiles of the lists have a form, the largest first."""
    unseen = hides_in_tiles(problem)
    fits = [
        tile
        for tile in tiles_for(problem.head_dim, problem.head_dim_v)
        if tile.WARPGROUPS == 2 and tile.QK_UNIT == 0 and not list_layout(problem.program, tile.BLOCK_M, tile.BLOCK_N).program
    ]
    if unseen:  # zeroing values in the loop leaves no registers for 128 keys at 128 columns
        fits = [tile for tile in fits if tile.BLOCK_N == 64 or tile.BLOCK_DV == 64] or fits
    return [
        Choice(
            compiled_for(problem, IntervalMask(listed=True), unseen, tile, newer)._replace(
                LISTS=list_layout(problem.program, tile.BLOCK_M, tile.BLOCK_N), TAIL=False, REGISTERS=(240, 24)
            ),
            "tile lists: two warpgroups, for three have too few registers" if i == 0 else "asked for",
        )
        for i, tile in enumerate(fits)
    ]


def unseen_by_all(problem: Problem, mask: IntervalMask) -> bool:
    """May there be keys that no query sees? In a packed batch those of the next sequence."""
    return problem.varlen or unseen_keys(mask, problem.seqlen_q, problem.seqlen_k)


def crowded(problem: Problem) -> bool:
    """Do features need registers?"""
    return problem.alibi or problem.dropout_p > 0 or problem.bias is not None or "entropy" in problem.stats


def shortage(tile: Config, mask: IntervalMask, unseen: bool, newer: bool, features: bool = False) -> str:
    """Why a thread has too few registers for the tile under this mask and with features; "" if it has enough."""
    registers = f"{tile.BLOCK_M}×{tile.BLOCK_N} has {tile.REGISTERS[0]} registers a thread, too few for"
    if tile.WARPGROUPS == 3 and (unseen or mask.left):
        return f"{registers} rows that begin after key 0 or keys that no query sees"
    if tile.WARPGROUPS == 3 and features:
        return f"{registers} ALiBi, dropout, a bias, a softcap or the entropy"
    if newer and tile.WARPGROUPS == 3 and mask.band:
        return f"{registers} a mask under Triton 3.8 or newer"
    if newer and tile.BLOCK_N == 128 and tile.BLOCK_D > 64 and mask.terms and (unseen or mask.left):
        return f"{registers} this mask under Triton 3.8 or newer"
    return ""


def planned(problem: Problem, mask: IntervalMask, tiles: list[Config]) -> Choice:
    """The tile that is estimated to be fastest. Packed batches, whose lengths only the device knows, take the first."""
    first, queries, keys = tiles[0], problem.seqlen_q, problem.seqlen_k
    if len(tiles) == 1:
        return Choice(first, only_reason(first))
    if first.QK_UNIT > 0:
        return Choice(first, "columns in units of 64 without padding leave shared memory for 128 keys")
    if mask.band and not problem.varlen:
        mean = float(visited_keys(mask, first, queries, keys).mean())
        if mean <= SHORT_KEYS:
            short = next((tile for tile in tiles if tile.BLOCK_N == 64), first)
            return Choice(
                short, f"{mean:.0f} keys a query tile on average: 64 at a time follow the mask's edge more closely"
            )
    three = next((tile for tile in tiles if tile.WARPGROUPS == 3 and tile.BLOCK_D == 128), None)
    if three and max(problem.head_dim, problem.head_dim_v) <= NARROWER and not problem.varlen:
        ours, others = (computed(tile, mask, queries, keys) for tile in (three, first))
        if ours <= THREE_GAIN * others:
            return Choice(three, f"three warpgroups hide the softmax of {NARROWER} columns or fewer")
    long = [tile for tile in tiles if tile.BLOCK_N == first.BLOCK_N]
    if len(long) == 1:
        return Choice(first, only_reason(first))
    if problem.varlen:
        return Choice(first, "a packed batch: the lengths are known on the device only")
    best = min(long, key=lambda tile: estimated_time(tile, mask, queries, keys))
    if best.WARPGROUPS == 3:
        return Choice(best, "three warpgroups hide the softmax where ping-pong between two does not")
    return Choice(best, "128 queries fit the length and the mask better than 192")


def only_reason(tile: Config) -> str:
    if max(tile.BLOCK_D, tile.BLOCK_DV) == 256:
        return "256 columns leave no shared memory or registers for 128 keys"
    if tile.PINGPONG:
        return "two warpgroups issue their products in turns: one's softmax runs under the other's products"
    if tile.BLOCK_N == 64:
        return "128 keys leave too few registers under this mask and Triton 3.8 or newer"
    return "two warpgroups, for three have too few registers under this mask"


def computed(tile: Config, mask: IntervalMask, queries: int, keys: int) -> int:
    """Queries times keys of a head's tiles."""
    blocks = -(-queries // tile.BLOCK_M)
    return tile.BLOCK_M * (int(visited_keys(mask, tile, queries, keys).sum()) if mask.band else blocks * keys)


def estimated_time(tile: Config, mask: IntervalMask, queries: int, keys: int) -> float:
    """Of a head, in multiples of what one query and one key take in the wide tile."""
    blocks = -(-queries // tile.BLOCK_M)
    visited = computed(tile, mask, queries, keys) // tile.BLOCK_M
    if tile is NARROW:
        return (visited + blocks * OVERHEAD_KEYS) * tile.BLOCK_M / NARROW_SPEED
    return (visited + blocks * (OVERHEAD_MASKED if mask.band else OVERHEAD_WIDE)) * tile.BLOCK_M


def compiled_for(problem: Problem, mask: IntervalMask, unseen: bool, tile: Config, newer: bool) -> Config:
    """The tile with what the problem needs. Rows that begin after key 0 and keys that no query sees leave fewer registers."""
    tail = not mask.terms and problem.seqlen_k % tile.BLOCK_N > 0
    roomy = not (mask.left or unseen or mask.listed)
    lazy = roomy and not (tail and tile.BLOCK_DV == 256) if newer else not (unseen and tile.BLOCK_DV == 128)
    in_registers = tile.Q_IN_REGISTERS if roomy and not ((mask.band and newer) or crowded(problem)) else 0
    return tile._replace(
        LAZY_RESCALE=lazy,
        Q_IN_REGISTERS=in_registers,
        QK_COLUMNS=used_columns(problem.head_dim, tile.BLOCK_D),
        V_COLUMNS=output_columns(problem.head_dim_v, tile.BLOCK_DV),
        RELEASE_Q_EARLY=(in_registers > 0 or tile.QK_UNIT > 0) and (mask.band or problem.seqlen_k <= RELEASE_EARLY_KEYS),
        TAIL=tail,
        UNSEEN_KEYS=unseen,
        SCORES=scores_form(problem, mask),
        SINKS=problem.sinks,
        ALIBI=alibi_form(problem, mask),
        BIAS=bias_form(problem),
        DROPOUT=problem.dropout_p > 0,
        STATS=statistics_form(problem),
        LEFT_SKIP=mask.left and not (unseen or tile.PINGPONG or mask.listed),
        WORDS=words(problem, mask, unseen, tile),
        ALIBI_FIRST=first_alibi(problem, mask),
        **bias_stages(problem, mask, tile),
        QUADS=in_quads(problem),
        **drawing(problem, tile),
        **quick_pieces(problem, tile, not (mask.left or unseen)),
        PINGPONG=tile.PINGPONG and not in_quads(problem),  # takes registers, and Philox keeps a warpgroup busy without
        **mask_config(problem, mask),
    )


def drawing(problem: Problem, tile: Config) -> dict[str, Any]:
    """Where a warpgroup of its own makes the bits of dropout: their stages, and all registers."""
    if not drawn_apart(problem) or tile.WARPGROUPS != 2:
        return {}
    at_once = 256 // tile.BLOCK_N  # eight calls of a thread
    early = bool(problem.stats)  # else ptxas moves their sums below the wait for P·V
    registers = {"REGISTERS": (200, 24), "DRAW_REGISTERS": 88}
    return {"DRAWERS": 1, "DRAW_STAGES": 4, "DRAW_AT_ONCE": at_once, "DRAW_EARLY": early, **registers}


def quick_pieces(problem: Problem, tile: Config, roomy: bool) -> dict[str, int]:
    """What `Config.QUICK`, `QUICK_AHEAD` and `FOURS` say. Pieces as timed on an H200; with them ALiBi, softcap, dropout, values
    of another width and head dims below 64 took 1 to 8 % longer, 256 columns 1 % less, and ptxas 12.8 lost addresses there.
    Statistics want maxima."""
    plain = not (problem.bias is not None or problem.alibi or problem.softcap or problem.dropout_p)
    if not plain or problem.head_dim < 64 or tile.BLOCK_D != tile.BLOCK_DV or tile.BLOCK_D == 256:
        return {}
    if problem.stats:
        return {"FOURS": True}
    if tile.BLOCK_D == 128 and tile.BLOCK_N == 128:
        pieces = 2 if roomy else 4
        return {"QUICK": pieces, "QUICK_AHEAD": pieces, "FOURS": True}
    return {"QUICK": 4 if tile.BLOCK_N == 128 else 1, "FOURS": True}


def words(problem: Problem, mask: IntervalMask, unseen: bool, tile: Config) -> bool:
    """Are masks of bands words of bits? Not where they find no registers."""
    return mask.band and not (mask.listed or problem.varlen or (unseen and tile.BLOCK_DV == 256))


def output_columns(dim: int, width: int) -> int:
    """Columns of the output that are computed; 0: all of the tile's. Left out is half of them or more: to compute 96 or 80 of 128
    in pieces takes longer than all (H200: 3 and 1 %)."""
    used = used_columns(dim, width)
    return used if used <= width // 2 else 0


def scores_form(problem: Problem, mask: IntervalMask) -> str:
    """What `Config.SCORES` says."""
    if problem.softcap > 0:
        return cap_form(problem)
    return "fold" if folds(problem) or first_alibi(problem, mask) else "scale"


def folds(problem: Problem) -> bool:
    """May the scale be folded into exp2? It must be positive, and nothing come between."""
    return problem.scale > 0 and not problem.alibi and problem.bias is None


def first_alibi(problem: Problem, mask: IntervalMask) -> bool:
    """Do scores accumulate from ALiBi's part? Only where it is the same for all rows but for a constant."""
    past = alibi_form(problem, mask) == "past"
    return past and problem.scale > 0 and problem.bias is None and problem.softcap == 0


def bias_stages(problem: Problem, mask: IntervalMask, tile: Config) -> dict[str, int]:
    """Stages of a bias in shared memory, and what makes room for them; 0 where it is not read by a tensor map."""
    sides = problem.bias is not None and problem.bias[2] == problem.seqlen_q and problem.bias[3] == problem.seqlen_k
    ok = sides and problem.seqlen_k % 8 == 0 and not (mask.left or mask.listed or problem.varlen)
    if not ok or problem.dtype not in ("float16", "bfloat16") or tile.WARPGROUPS != 2 or tile.BLOCK_N != 128:
        return {"BIAS_STAGES": 0}
    if tile.BLOCK_D == tile.BLOCK_DV == 64:
        return {"BIAS_STAGES": 3}
    return {"BIAS_STAGES": 1, "Q_STAGES": 1} if tile.BLOCK_D == tile.BLOCK_DV == 128 else {"BIAS_STAGES": 0}


LARGEST_CAP = 256.0
"""Up to it softcap by `logistic` moves a score by less than 1e-4."""


def cap_form(problem: Problem) -> str:
    """How a softcap is computed: where nothing is added to scores and it is not huge, without tanh."""
    plain = not (problem.alibi or problem.stats) and problem.bias is None and problem.softcap <= LARGEST_CAP
    return "cap" if plain else "softcap"


def mask_config(problem: Problem, mask: IntervalMask) -> dict[str, Any]:
    """What every kernel is compiled for."""
    return {
        "TERMS": len(mask.terms),
        "BAND": mask.band,
        "LEFT": mask.left,
        "VARLEN": problem.varlen,
        "BOTTOM_RIGHT": mask.bottom,
        "ORDERED": problem.varlen,
    }
