"""The Hopper backend's host side: which masks are intervals, what is refused and why, and the order of tiles."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tilewise.api.call_cache import tensor_facts
from tilewise.backends import plans
from tilewise.backends.base import Inputs
from tilewise.backends.hopper import plan as planning
from tilewise.backends.hopper.arguments import ForwardPlan, make_plan
from tilewise.backends.hopper.backend import backend, bias_reason, layout_reason
from tilewise.backends.hopper.config import TABLE, Config, tiles_for
from tilewise.backends.hopper.intervals import IntervalMask, interval_mask, typed, unseen_keys
from tilewise.backends.hopper.launch import term_on
from tilewise.backends.hopper.structs import Arguments, Divisor, Term
from tilewise.backends.hopper.tile_order import BEYOND_CACHE, EVEN, OVERHEAD_KEYS, best_order, tile_order, visited_keys
from tilewise.hardware import lookup
from tilewise.masks import Mask, TileMap, allowed
from tilewise.problem import Problem

LENGTHS = torch.tensor([0, 7, 20])
STARTS = torch.tensor([3, 0, 9])
INTERVALS: dict[str, Mask] = {
    "full": tw.full(),
    "nothing": ~tw.full(),
    "causal": tw.causal(),
    "top-left": tw.causal("top_left"),
    "offset": tw.causal(offset=4),
    "offsets": tw.causal(offset=torch.tensor([-3, 0, 12])),
    "window": tw.window(5),
    "two-sided": tw.window(3, 4),
    "both corners": tw.causal() & tw.causal("top_left"),
    "prefix": tw.prefix(6),
    "prefix-lm": tw.causal() | tw.prefix(9),
    "padding": tw.key_padding(LENGTHS),
    "left padding": tw.causal() & tw.key_padding(LENGTHS, STARTS),
    "window and range": tw.window(6) & tw.prefix(8),
}
REFUSED: dict[str, Mask] = {
    "tables or ids": tw.documents(torch.zeros(2, 20, dtype=torch.int32), q_ids=torch.zeros(2, 20, dtype=torch.int32)),
    "begin after key 0": tw.window(3) | tw.prefix(2),
    "union of 3 parts": tw.causal() | tw.prefix(3) | tw.causal("top_left"),
    "another band": tw.causal() & tw.causal(offset=torch.tensor([1, 2])),
}


def problem_of(mask: Mask | None, queries: int, keys: int, batch: int = 3, **more: Any) -> Problem:
    fields = {"heads": 4, "head_dim": 64, "device": "cuda", **more}
    return Problem.of(batch=batch, seqlen=queries, kv_seqlen=keys, mask=mask, **fields)


def plan_for(problem: Problem, units: int = 132) -> ForwardPlan:
    return make_plan(problem, replace(lookup("h200"), units=units), lambda *_: None)


def bounds(form: IntervalMask, keys: int, b: int, q: int) -> tuple[int, int]:
    """What the kernel's key_lo and key_hi compute, in Python."""
    if not form.terms:
        return 0, keys
    ends = []
    for term in form.terms:
        t = term_on(term, 3, torch.device("cpu"))
        off = 0 if t.off is None else int(t.off[b])
        start = max(t.start, 0 if t.first is None else int(t.first[b]))
        end = min(t.end, keys if t.last is None else int(t.last[b]))
        ends.append((max(q + t.lo + off, start) if form.left else 0, min(q + t.past + off, end) if form.band else end))
    return ends[0][0], max(end for _, end in ends)


def test_queries_in_registers_where_that_is_faster_and_there_are_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(mask: Mask | None, length: int, newer: bool = False, d: int = 256) -> tuple[int, bool]:
        monkeypatch.setattr(planning, "newer_registers", lambda: newer)
        config = plan_for(problem_of(mask, length, length, head_dim=d), 132).config
        return config.Q_IN_REGISTERS, config.RELEASE_Q_EARLY

    assert held(None, 2048) == (64, True) and held(None, 8192) == held(None, 8192, newer=True) == (64, False)
    assert held(tw.causal(), 16384) == (64, True)
    assert held(tw.window(100), 2048) == held(tw.causal(), 2048, newer=True) == held(None, 512, d=128) == (0, False)


def test_the_output_is_rescaled_late_where_there_are_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(mask: Mask | None, d: int, length: int = 2048, newer: bool = False) -> bool:
        monkeypatch.setattr(planning, "newer_registers", lambda: newer)
        return plan_for(problem_of(mask, length, length, head_dim=d), 132).config.LAZY_RESCALE

    padding = tw.key_padding(torch.tensor([100, 200, 300]))
    assert all(late(mask, d) for mask in (None, tw.causal(), tw.window(100)) for d in (64, 128, 256))
    assert late(padding, 64) and late(padding, 256) and not late(padding, 128)
    assert late(None, 256, 3000) and not late(None, 256, 3000, newer=True)
    assert not late(padding, 64, newer=True) and not late(tw.window(100), 256, newer=True)


@pytest.mark.parametrize("lengths", [(20, 20), (9, 20), (20, 9), (1, 20)], ids=str)
@pytest.mark.parametrize("name", INTERVALS)
def test_forms_are_the_masks(name: str, lengths: tuple[int, int]) -> None:
    problem = problem_of(INTERVALS[name], *lengths)
    form = interval_mask(problem.program, *lengths)
    assert isinstance(form, IntervalMask), form
    tile = allowed(problem.program, problem.shape, (0, lengths[0]), (0, lengths[1]), np.arange)
    want = np.broadcast_to(True if tile is None else np.asarray(tile), (3, 4, *lengths))
    k = np.arange(lengths[1])
    for b, q in itertools.product(range(3), range(lengths[0])):
        lo, hi = bounds(form, lengths[1], b, q)
        assert (want[b, 0, q] == ((k >= lo) & (k < hi))).all(), (b, q, lo, hi)


@pytest.mark.parametrize("reason", REFUSED)
def test_other_masks_are_refused(reason: str) -> None:
    form = interval_mask(problem_of(REFUSED[reason], 20, 20, batch=2).program, 20, 20)
    assert isinstance(form, str) and reason in form


def test_reasons_name_every_obstacle() -> None:
    more: dict[str, Any] = {"softcap": 1.0, "sinks": True, "alibi": True, "bias": (1, 1, 9, 9)}
    problem = problem_of(None, 9, 9, head_dim=100, dtype="float32", **more)
    reasons = " ".join(backend.supports(problem, backward=True).reasons)
    for word in ("float32", "head_dim 100", "a bias is not served here beside ALiBi"):
        assert word in reasons


def test_layouts_tma_cannot_describe_are_refused() -> None:
    x = torch.zeros(2, 4, 16, 64, dtype=torch.float16)
    assert layout_reason("q", x) is None
    assert layout_reason("q", x.transpose(1, 2)) is None
    for bad in (x.transpose(2, 3), x[..., 1:57], x[:, :1].expand(2, 4, 16, 64)):
        assert "contiguous" in (layout_reason("q", bad) or "")


def test_biases_that_are_read() -> None:
    x = torch.zeros(1, 4, 16, 64)
    for good in (x, x.half(), x.mT, x[..., :1], x.expand(3, 4, 16, 64), x[:, :, ::3, 1::2]):
        assert bias_reason(good) is None
    assert "bias.float()" in (bias_reason(x.double()) or "")
    far = torch.empty_strided((1, 1, 2, 64), (0, 0, 1 << 23, 1), device="meta")
    assert "too far apart" in (bias_reason(far) or "")


def test_remembered_choices_tell_addresses_apart() -> None:
    """The choice of a backend is remembered by shapes and strides; a tensor map needs its address at a multiple of 16 too."""
    memory = torch.zeros(4 * 16 * 64 + 8, dtype=torch.float16)
    first = -memory.data_ptr() % 16 // 2
    even, odd = (memory[i : i + 4 * 16 * 64].view(1, 4, 16, 64) for i in (first, first + 1))
    assert layout_reason("q", even) is None and layout_reason("q", odd) is not None
    assert tensor_facts(even, even, even) != tensor_facts(odd, even, even)


def test_few_queries_are_declined() -> None:
    assert backend.declines(problem_of(None, 1, 4096)) is not None
    assert backend.declines(problem_of(None, 512, 512)) is None
    assert backend.declines(problem_of(None, 512, 512), backward=True) is None


@pytest.mark.parametrize(
    ("head_dim", "more", "forward", "backward"),
    [
        *((d, {name: True}, True, True) for d in (32, 64, 128, 256) for name in ("sinks", "alibi")),
        *((d, {"dropout_p": 0.1}, True, True) for d in (32, 64, 96, 128, 256)),
        *((d, {"dropout_p": 0.1, "alibi": True}, d > 64, True) for d in (64, 128)),
        *((d, {"bias": (1, 4, 512, 512)}, True, True) for d in (64, 128)),
        (192, {"bias": (1, 4, 512, 512)}, False, False),
    ],
)
def test_which_features_are_served(head_dim: int, more: dict[str, Any], forward: bool, backward: bool) -> None:
    """Without being asked for by name; by name all are."""
    problem = problem_of(None, 512, 512, head_dim=head_dim, **more)
    for is_backward, wanted in ((False, forward), (True, backward)):
        found = plans.serving(problem, lookup("h200"), backward=is_backward)
        assert next(choice.name for choice in found if choice.chosen) == ("hopper" if wanted else "triton")
        assert found[0].serves and (wanted or found[0].reasons)


def test_products_leave_out_columns_of_zeros() -> None:
    """As many pieces as there are, each a power of two that begins at a multiple of 64 columns."""
    from tilewise.backends.hopper.operands import spans

    pieces = getattr(spans, "fn", spans)
    wanted = {32: [(0, 32)], 80: [(0, 64), (64, 16)], 96: [(0, 64), (64, 32)], 192: [(0, 128), (128, 64)]}
    for dim in range(8, 257, 8):
        config = planning.configs(problem_of(tw.causal(), 300, 300, head_dim=dim, head_dim_v=64), "forward")[0].config
        columns = config.QK_COLUMNS or config.BLOCK_D
        found = pieces(0, columns)
        assert dim <= columns <= config.BLOCK_D and found == wanted.get(dim, found)
        assert all(first % 64 == 0 and width & (width - 1) == 0 and width >= 16 for first, width in found)
        assert sum(width for _, width in found) == columns


def test_division_by_multiplication() -> None:
    rng = np.random.default_rng(0)
    for value in [*range(1, 200), *rng.integers(1, 2**30, 200).tolist()]:
        _, factor, shift = Divisor.of(int(value))
        for n in (0, 1, value - 1, value, value + 1, 2**31 - 1, int(rng.integers(2**31))):
            n = min(int(n), 2**31 - 1)
            assert (((factor % 2**32) * n >> 32) + n) >> shift == n // value


def order(a: Arguments, block: int) -> list[list[tuple[int, int]]]:
    """(head, first row) of each program's tiles, as `schedule` computes them."""

    def tile_at(i: int, me: int) -> int:
        if a.order is not None:
            return int(a.order[i, me])
        t = i * a.programs + (me if i % 2 == 0 else a.programs - 1 - me)
        return t if t < a.total else -1

    programs: list[list[tuple[int, int]]] = []
    for me in range(a.programs):
        mine = []
        for i in itertools.count():
            t = tile_at(i, me)
            if t < 0:
                break
            head, r = divmod(t, a.blocks.value)
            mine.append((head, (a.last_block - r) * block))
        programs.append(mine)
    return programs


@pytest.mark.parametrize("mask", [None, tw.causal(), tw.window(200), ~tw.causal(), tw.causal() | tw.prefix(100)], ids=repr)
@pytest.mark.parametrize("shape", [(3, 70, 4), (1, 4100, 6), (5, 300, 7), (1, 64, 1)], ids=str)
def test_every_tile_once(shape: tuple[int, int, int], mask: Mask | None) -> None:
    batch, length, heads = shape
    plan = plan_for(problem_of(mask, length, length, batch, heads=heads), 8)
    block = plan.config.BLOCK_M
    tiles = order(plan.arguments, block)
    every = sorted(tile for mine in tiles for tile in mine)
    assert every == [(h, m) for h in range(batch * heads) for m in range(0, length, block)]


@pytest.mark.parametrize("length", [512, 2048, 16384])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_even_loads(d: int, length: int) -> None:
    """Also where a cluster of heads is twice as many tiles as there are programs, which taking turns does not survive."""
    problem = problem_of(tw.causal(), length, length, 16384 // length, heads=2048 // d, head_dim=d)
    plan = plan_for(problem, 132)
    block, step = plan.config.BLOCK_M, plan.config.BLOCK_N
    loads = [
        sum(-(-min(m + block, length) // step) * step + OVERHEAD_KEYS for _, m in mine)
        for mine in order(plan.arguments, block)
    ]
    # 4 % is what the kernel leads by elsewhere; taking turns comes out at 8 to 70 %
    assert max(loads) <= 1.04 * sum(loads) / 132


@pytest.mark.parametrize("tail", [1, 2, 3, 9])
def test_mixed_clusters_hold_every_tile_once(tail: int) -> None:
    found, _ = tile_order(np.arange(128, 1025, 128), 12, 2, 5, tail)
    assert sorted(found[found >= 0].tolist()) == list(range(12 * 8)) and (found[-1] < 0).all()


@pytest.mark.parametrize("mask", ["causal", "window", "two-sided", "top-left", "offset", "prefix-lm"])
@pytest.mark.parametrize("lengths", [(1000, 1000), (300, 1500), (1500, 300)], ids=str)
def test_visited_keys_are_those_of_the_mask(mask: str, lengths: tuple[int, int]) -> None:
    problem = problem_of(INTERVALS[mask], *lengths)
    form = interval_mask(problem.program, *lengths)
    assert isinstance(form, IntervalMask)
    config = TABLE[128, 128]
    keys = visited_keys(form, config, *lengths)
    tiles = TileMap(problem.program, problem.shape, config.BLOCK_M, config.BLOCK_N)
    assert keys.tolist() == [max(1, int(np.count_nonzero(tiles.row(i)))) * config.BLOCK_N for i in range(tiles.rows)]


@pytest.mark.parametrize(
    ("mask", "length", "tile"),
    [
        (None, 128, (128, 128)),
        (None, 512, (128, 128)),
        (None, 2048, (192, 128)),
        (tw.causal(), 512, (128, 64)),
        (tw.causal(), 2048, (128, 128)),
        (tw.causal(), 16384, (192, 128)),
        (tw.window(64), 16384, (128, 64)),
        (tw.window(4096), 16384, (128, 128)),
    ],
    ids=str,
)
def test_tiles_that_measured_fastest(
    mask: Mask | None, length: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "newer_registers", lambda: False)
    config = plan_for(problem_of(mask, length, length), 132).config
    assert tile == (config.BLOCK_M, config.BLOCK_N)


def test_no_three_warpgroups_where_they_would_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "newer_registers", lambda: True)
    widths = [plan_for(problem_of(mask, 16384, 16384), 132).config for mask in (None, tw.causal())]
    assert [config.WARPGROUPS for config in widths] == [3, 2]
    packed = partial(problem_of, tw.causal(), 300, 300, head_dim=128, varlen=True)
    assert plan_for(packed()).config.BLOCK_N == 64
    monkeypatch.setattr(planning, "newer_registers", lambda: False)
    assert plan_for(packed()).config.BLOCK_N == 128


@pytest.mark.parametrize("lengths", [(20, 20), (9, 20), (20, 9), (1, 20)], ids=str)
@pytest.mark.parametrize("name", INTERVALS)
def test_keys_that_no_query_sees_are_foreseen(name: str, lengths: tuple[int, int]) -> None:
    problem = problem_of(INTERVALS[name], *lengths)
    form = interval_mask(problem.program, *lengths)
    assert isinstance(form, IntervalMask)
    tile = allowed(problem.program, problem.shape, (0, lengths[0]), (0, lengths[1]), np.arange)
    seen = np.broadcast_to(True if tile is None else np.asarray(tile), (3, 4, *lengths)).any(axis=2)
    # Forgetting some would let their NaN through; only masks with numbers on the device may be overcautious.
    overcautious = any(term.off is not None or term.first is not None for term in form.terms)
    assert unseen_keys(form, *lengths) == (not seen.all()) or (overcautious and unseen_keys(form, *lengths))


def most_skipped(tile: Config) -> int:
    """Key tiles at the edge of a mask that the first warpgroup skips: fewer than stages, for it waits for the next with the last
    values still in use."""
    return -(-(tile.BLOCK_M - 64) // tile.BLOCK_N)


TILES = list(dict.fromkeys(tile for d, dv in TABLE for tile in tiles_for(d, dv)))


@pytest.mark.parametrize("tile", TILES, ids=lambda c: f"d{c.BLOCK_D}-{c.BLOCK_M}-{c.BLOCK_N}")
@pytest.mark.parametrize("past", [1, 40, 64, 65, 127, 128, 1000])
def test_edges_of_a_mask_as_the_kernel_takes_them(tile: Config, past: int) -> None:
    """A warpgroup skips fewer key tiles than there are stages, and masks at most two: `consumer.remaining_tiles` relies on it."""
    n = tile.BLOCK_N
    for m0 in range(0, 2048, tile.BLOCK_M):
        last = -(-(m0 + tile.BLOCK_M - 1 + past) // n)
        for row0 in range(m0, m0 + tile.BLOCK_M, 64):
            own = -(-(row0 + 63 + past) // n)
            assert last - own <= most_skipped(tile) < tile.KV_STAGES
            assert own - (row0 + past) // n <= 2


def test_small_clusters_unless_they_are_uneven() -> None:
    keys = np.arange(128, 2049, 128)
    small, longest = tile_order(keys, 64, 2, 132)
    large, even = tile_order(keys, 64, 64, 132)
    assert longest > 1.05 * even
    assert (best_order(keys, 64, (2, 64), 132, held=64) == large).all()
    # without larger ones to choose from, the last of the small ones are mixed
    tails = [tile_order(keys, 64, 2, 132, tail) for tail in (2, 3)]
    assert min(t for _, t in tails) < longest
    assert any((best_order(keys, 64, (2, 2), 132, held=6) == order).all() for order, _ in tails)
    assert not (best_order(keys, 64, (2, 2), 132, held=6) == small).all()
    many, _ = tile_order(keys, 4096, 16, 132)
    assert (best_order(keys, 4096, (16, 4096), 132, held=4096) == many).all()


def test_what_the_cache_does_not_hold_must_pay() -> None:
    """Heads leave it for programs that are evener by more than 5 %, not by less."""
    keys = np.arange(128, 2049, 128)
    (_, longest), (large, even) = (tile_order(keys, 64, cluster, 132) for cluster in (2, 64))
    assert longest > BEYOND_CACHE * even
    assert (best_order(keys, 64, (2, 64), 132, held=2) == large).all()
    # causal, 8192 tokens, 16 heads of which it holds 8: two clusters as one are 1.1 % evener
    keys, held = np.arange(192, 8449, 192), 8
    (plain, alone), (mixed, evener) = (tile_order(keys, 16, held, 132, tail) for tail in (1, 2))
    assert EVEN * evener < alone < BEYOND_CACHE * evener
    assert (best_order(keys, 16, (held,), 132, held) == plain).all()
    assert (best_order(keys, 16, (held,), 132, 16) == mixed).all()


def test_plans_keep_no_tensors() -> None:
    plan = plan_for(problem_of(INTERVALS["left padding"], 20, 20), 8)
    assert plan.arguments.terms[0][4:] == (None, "*i32", "*i32")
    assert typed(Term(0, 1, 0, 1, None, LENGTHS, LENGTHS)) == Term(0, 1, 0, 1, None, "*i32", "*i32")


def test_inputs_are_judged() -> None:
    x = torch.zeros(1, 4, 16, 64, dtype=torch.bfloat16)
    problem = problem_of(None, 16, 16, 1)
    assert any("q:" in reason for reason in backend.supports(problem, Inputs(x.transpose(2, 3), x, x)).reasons)
