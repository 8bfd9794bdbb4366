"""Which kernels and tiles the backward takes for a problem, and what they are compiled for: the one place that decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.backends.gpu.lists import list_layout
from tilewise.backends.hopper.backward.config import (
    KEYS,
    KEYS_SHORT,
    LISTED_SEPARATE_DQ,
    QUERIES,
    QUERIES_SHORT,
    SEPARATE_DQ,
    SEPARATE_DQ_SOFTCAP,
    SEPARATE_DQ_UNMASKED,
    SPLIT,
    KeysConfig,
    QueriesConfig,
    widths,
)
from tilewise.backends.hopper.choose import Choice, cap_form, mask_config
from tilewise.backends.hopper.compiler import newer_registers
from tilewise.backends.hopper.config import used_columns
from tilewise.backends.hopper.features import alibi_form, bias_form, gradient_form
from tilewise.backends.hopper.intervals import IntervalMask, mask_of
from tilewise.backends.hopper.list_plan import all_seen, hides_in_tiles
from tilewise.errors import PlanError
from tilewise.masks import may_have_empty_rows
from tilewise.problem import Problem

FEW_KEYS = {128: 400}
"""By head dim: up to so many keys for each query, on average, dQ by a kernel of its own costs less than clearing and casting its
sums. H200: at 128 causal 512 (320 keys in tiles) 246 against 235 TFLOP/s, causal 1k 334 against 365; at 64 217 against 234.

Not in packed batches, whose lengths the host does not know. At 128, causal, 16k tokens and 16 heads, sums and two kernels: 25
sequences of 128 to 2,047 487 and 549 µs (kernels alone); as called, one of 16k beside 500 of 32 5.31 and 6.96 ms, 512 of 32 0.92
and 1.08, and 32 of 512, which two kernels suit, 429 and 412 µs."""


def separate_dq(problem: Problem, mask: IntervalMask) -> Choice:
    """Whether dQ gets a kernel of its own, and why."""
    if problem.asked("backward"):
        return Choice(False, "asked for")
    if problem.asked("backward_dkdv") or problem.asked("backward_dq"):
        return Choice(True, "asked for")
    if reason := no_sums(problem):
        return Choice(True, reason)
    reason = "dQ is added up in memory: five products a tile, not the seven of two kernels"
    tile = sum_tiles(problem)[0]
    if problem.varlen:
        reason = "dQ is added up in memory: a packed batch may hold long sequences, whatever their mean"
    elif (mean := keys_per_query(problem, mask, tile)) <= FEW_KEYS.get(tile.BLOCK_D, 0):
        return Choice(
            True, f"{mean:.0f} keys a query: recomputing scores for dQ costs less than clearing and casting its sums"
        )
    if problem.bias is not None:
        reason += "; where the gradient of the bias is wanted, two"
    return Choice(False, f"{reason}; {crowd}" if (crowd := too_crowded(problem)) else reason)


def no_sums(problem: Problem) -> str:
    """Why dQ cannot be added up in memory; "" if it can."""
    tile = KEYS[widths(problem.head_dim, problem.head_dim_v)]
    if not tile.REDUCE_DQ:
        return "at 256 columns the registers hold 64 keys, and dQ would be added up for so few only"
    if problem.bias is not None and tile.BLOCK_D > 64:
        return "a bias finds no registers beside dQ, and its gradient is written where queries are held"
    if problem.deterministic:
        return "deterministic=True: sums in memory are added in any order"
    return ""


def with_bias_gradient(problem: Problem) -> Problem:
    """The problem as it is planned where the gradient of its bias is wanted: in two passes. Asked in every such call, so it is
    kept with the problem."""
    key = "hopper bias gradient"
    if key not in problem.memory:
        separate, asked = separate_dq(problem, mask_of(problem)).config, problem.asked("backward")
        if not separate and asked:
            raise PlanError(
                f"tile: hopper has no {asked[0]}×{asked[1]} for backward with a gradient of the bias, which is written where "
                "queries are held; name backward_dkdv or backward_dq"
            )
        usual = None if separate else keys_choices(problem, True)[0].config
        tile = () if usual is None else (*problem.tile, ("backward_dkdv", usual.BLOCK_M, usual.BLOCK_N))
        problem.memory[key] = replace(problem, tile=tile) if tile else None
    return problem.memory[key] or problem


def sum_tiles(problem: Problem) -> list[KeysConfig]:
    """Tiles with dQ added up in memory, the usual one first."""
    dims = widths(problem.head_dim, problem.head_dim_v)
    tiles = [KEYS_SHORT[dims]] if too_crowded(problem) else [KEYS[dims], KEYS_SHORT[dims]]
    if problem.varlen:
        # 64 queries follow the ends of sequences more closely. H200, d 64, 25 of 128 to 2,047 tokens, causal: 285 against 302 µs
        tiles.reverse()
    return list(dict.fromkeys(tiles))


def too_crowded(problem: Problem) -> str:
    """Why the kernel with dQ's sums takes 64 queries at a time where it could take 128; "" if it takes those."""
    if not KEYS[widths(problem.head_dim, problem.head_dim_v)].ACC_FROM_STATS:
        return ""
    if problem.softcap > 0 or problem.scale <= 0:
        return "scores are more than products to accumulate from -lse, and statistics find no registers beside 128 queries"
    if problem.dropout_p > 0:
        return "dropout finds no registers beside 128 queries"
    if problem.bias is not None:
        return "a bias finds no registers beside 128 queries"
    return "the mask of a list's tile finds no registers beside 128 queries" if mask_of(problem).listed else ""


def keys_choices(problem: Problem, separate: bool) -> list[Choice]:
    """Every tile of the kernel that holds keys, the usual one first: with dQ added up in memory, or (`separate`) without dQ."""
    dims, mask = widths(problem.head_dim, problem.head_dim_v), mask_of(problem)
    if mask.listed:
        found = [tile for tile in listed_tiles(problem) if tile.REDUCE_DQ != separate]
    elif not separate:
        found = [] if no_sums(problem) else sum_tiles(problem)
    elif problem.softcap > 0 or problem.dropout_p > 0 or problem.bias is not None:  # which find no registers beside 128 queries
        found = [SEPARATE_DQ_SOFTCAP[dims], SPLIT[dims]]
    else:
        usual = (SEPARATE_DQ if mask.terms or problem.varlen else SEPARATE_DQ_UNMASKED)[dims]
        found = [usual, *([SEPARATE_DQ_SOFTCAP[dims]] if dims == (64, 64) else []), SPLIT[dims]]
    reason = separate_dq(problem, mask).reason
    common = compiled_for(problem, mask)
    return [
        Choice(
            tile._replace(
                GROUPED=heads_inside(problem, mask, tile),
                **(common | list_config(problem, mask, tile) | columns_config(problem, mask, tile)),
            ),
            reason,
        )
        for tile in dict.fromkeys(found)
    ]


def heads_inside(problem: Problem, mask: IntervalMask, tile: KeysConfig) -> bool:
    """Do heads that share keys take turns at each query tile? Where work tiles differ in length, as under a causal mask: under
    a window all are alike and stay together anyway. Where a warpgroup has dK and dV, there are no registers for it beside slopes
    and dropout, in packed batches, and under masks of more than one interval of the shape."""
    unequal = mask.band and not mask.left and not mask.listed
    beside = problem.varlen or problem.alibi or problem.dropout_p > 0 or len(mask.terms) > 1
    beside = beside or any(at is not None for term in mask.terms for at in term[4:])
    return problem.group > 1 and unequal and (tile.SPLIT or not beside)


def listed_tiles(problem: Problem) -> list[KeysConfig]:
    """Tiles of the kernel that holds keys for tile lists: with dQ added up in memory, if that may be, and without."""
    dims = widths(problem.head_dim, problem.head_dim_v)
    sums = [] if no_sums(problem) else sum_tiles(problem)
    return [*sums, LISTED_SEPARATE_DQ[dims]]


def list_config(problem: Problem, mask: IntervalMask, tile: KeysConfig | QueriesConfig) -> dict[str, Any]:
    """What a kernel that walks lists is compiled for beside the rest."""
    if not mask.listed:
        return {}
    layout = list_layout(problem.program, tile.BLOCK_M, tile.BLOCK_N)
    # what is held may be hidden altogether, what is streamed in tiles that are visited only
    held, streamed = not all_seen(problem), hides_in_tiles(problem)
    if isinstance(tile, KeysConfig):
        return {"LISTS": layout, "UNSEEN_KEYS": held, "EMPTY_ROWS": streamed}
    return {"LISTS": layout, "UNSEEN_KEYS": streamed, "EMPTY_ROWS": held}


def queries_choices(problem: Problem, stat_rows: int) -> list[Choice]:
    """Every tile of the kernel that holds queries, the usual one first; `stat_rows` queries share a tile of statistics."""
    dims, mask = widths(problem.head_dim, problem.head_dim_v), mask_of(problem)
    found = [QUERIES[dims], *([QUERIES_SHORT[dims]] if dims in QUERIES_SHORT else [])]
    if (problem.bias is not None or mask.listed) and max(dims) == 128:  # 128 keys leave no registers for these
        found.reverse()
    reason = separate_dq(problem, mask).reason
    return [
        Choice(
            tile._replace(
                STAT_ROWS=stat_rows,
                HELD=(64, 64) if holds(problem, mask) and wide(tile) else (0, 0),
                K_STAGES=3 if wide(tile) else tile.K_STAGES,
                DBIAS=gradient_form(problem),
                **(compiled_for(problem, mask) | list_config(problem, mask, tile)),
            ),
            reason,
        )
        for tile in found
    ]


def compiled_for(problem: Problem, mask: IntervalMask) -> dict[str, Any]:
    dims = widths(problem.head_dim, problem.head_dim_v)
    return mask_config(problem, mask) | {
        "EMPTY_ROWS": problem.varlen or may_have_empty_rows(problem.program, problem.seqlen_q, problem.seqlen_k),
        "SCORES": cap_form(problem) if problem.softcap > 0 else "fold",
        "ALIBI": alibi_form(problem, mask),
        "BIAS": bias_form(problem),
        "DROPOUT": problem.dropout_p > 0,
        "QK_COLUMNS": used_columns(problem.head_dim, dims[0]),
        "V_COLUMNS": used_columns(problem.head_dim_v, dims[1]),
    }


def wide(tile: KeysConfig | QueriesConfig) -> bool:
    """256 columns of keys or values beside 128 of the others: there is shared memory for a third stage."""
    return tile.BLOCK_D + tile.BLOCK_DV == 384


def holds(problem: Problem, mask: IntervalMask) -> bool:
    """Do registers have room for operands? Where columns are padded, and no tile list needs them."""
    return not mask.listed and problem.head_dim <= 192 and problem.head_dim_v <= 128


def columns_config(problem: Problem, mask: IntervalMask, tile: KeysConfig) -> dict[str, Any]:
    """What a kernel that holds keys does with the columns of these head dims."""
    used = used_columns(problem.head_dim, tile.BLOCK_D) or tile.BLOCK_D
    used_v = used_columns(problem.head_dim_v, tile.BLOCK_DV) or tile.BLOCK_DV
    found: dict[str, Any] = {}
    if tile.REDUCE_DQ:
        found["DQ_PARTS"] = dq_parts(tile.BLOCK_M, used)
    if tile.SPLIT and wide(tile):
        found["Q_STAGES"] = 3
        if holds(problem, mask):
            found["HELD"] = (used, used_v)
    elif tile.REDUCE_DQ and tile.BLOCK_M == tile.BLOCK_D == 64:
        found["HELD"] = (0, 0) if newer_registers() else (used, 0 if problem.dropout_p > 0 else used_v)
    elif not tile.SPLIT and 64 < used < 128 and not mask.listed:
        found["HELD"] = (used, 64 if used <= 80 and used_v >= 64 else 0)
    return found


def dq_parts(queries: int, used: int) -> tuple[int, int]:
    """Columns of dQ by warpgroup: each has half of 128 queries, or half of the columns, whose units of 64 stay whole."""
    if queries == 128:
        return used, used
    return (64, used - 64) if used > 64 else (max(16, used // 2), max(16, used // 2))


def without_mask(config: KeysConfig) -> KeysConfig:
    """What the preprocess and postprocess kernels, which know no mask, are compiled for."""
    plain = KeysConfig._field_defaults
    names = ("TERMS", "BAND", "LEFT", "SCORES", "BOTTOM_RIGHT", "EMPTY_ROWS", "LISTS")
    names += ("UNSEEN_KEYS", "ORDERED", "GROUPED", "ALIBI", "BIAS", "DROPOUT", "QK_COLUMNS", "V_COLUMNS", "HELD")
    names += ("Q_STAGES", "K_STAGES", "V_STAGES", "OVERLAP_SCORES")
    return config._replace(**{name: plain[name] for name in names})


def keys_per_query(problem: Problem, mask: IntervalMask, tile: KeysConfig) -> float:
    """Keys in the tiles that a query sees, on average, where all sequences are equally long."""
    queries, keys = problem.seqlen_q, problem.seqlen_k
    if not mask.band:
        return keys
    return float(visiting_queries(mask, tile, queries, keys).sum()) * tile.BLOCK_N / queries


def visiting_queries(mask: IntervalMask, tile: KeysConfig, queries: int, keys: int) -> np.ndarray:
    """Queries in the tiles that visit each key tile, int64 [blocks]."""
    return mask.visited(queries, keys, tile.BLOCK_M, tile.BLOCK_N, by_key=True) * tile.BLOCK_M
