"""Launches over caches on the host: repeated calls move every tensor, plans are those of the call."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.cache.caches import build
from tilewise.api import cached_call
from tilewise.api.options import DEFAULTS
from tilewise.backends.pages import NewTokens, PagedPart, Turning
from tilewise.backends.triton import joined, paged, plan, run
from tilewise.backends.triton.backend import backend
from tilewise.hardware import device
from tilewise.problem import Problem

H200 = device("h200")


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from leaves(part)


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("csr", [False, True])
def test_recorded_launches_know_all_of_their_tensors(
    stored: torch.dtype | None, csr: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a recording does not know stays where it was at the first call."""
    kept: list[tuple[Any, Any]] = []

    def recording(*_: Any) -> Any:
        tiles = plan.tiles(problems[0], H200) if problems else None
        return SimpleNamespace(plan=tiles, repeat=lambda tensors: False, record=lambda *both: kept.append(both))

    monkeypatch.setattr(paged, "recorder", SimpleNamespace(get=recording))
    monkeypatch.setattr(paged, "Recording", recording)
    monkeypatch.setattr(paged, "_appends", {})
    for module in (paged, run):
        monkeypatch.setattr(module, "spec_of", lambda device: H200)
    problems: list[Problem] = []
    built = build([1] * 3, [300, 500, 7], stored=stored, csr=csr, dtype=torch.bfloat16)
    pages, q = built.cache.pages, built.q.transpose(0, 1)[None]
    room = pages.entries.shape[0] * pages.page
    problems.append(
        Problem.of(heads=4, kv_heads=2, batch=3, seqlen=3, kv_seqlen=room, head_dim=32, mask=tw.causal(), varlen=True,
                   page=16, splits=4, stored=str(stored or "").removeprefix("torch."), device="cuda")
    )  # fmt: skip
    inputs = tw.backends.base.Inputs(q, q, q, cu_q=built.cu)
    backend.paged(problems[0], inputs, pages)
    new = torch.randn(3, 2, 32).bfloat16()
    angles = torch.rand(600, 8)
    backend.append(pages, NewTokens(built.q, new, new.clone(), built.cu, turning=Turning(angles, angles + 1, False, None)))
    assert [len(launches) for _, launches in kept] == [2, 1]
    for tensors, launches in kept:
        known = {id(x) for x in tensors if x is not None}
        for launch in launches:
            assert all(id(x) in known for x in leaves(launch.args))


def test_a_recorded_join_knows_all_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch that merges what a plan has computed apart."""
    kept: list[tuple[Any, Any]] = []
    fake = SimpleNamespace(repeat=lambda tensors: False, record=lambda *both: kept.append(both))
    monkeypatch.setattr(joined, "Recording", lambda *_: fake)
    monkeypatch.setattr(joined, "_joins", {})
    q, place = torch.empty(1, 4, 6, 32).bfloat16(), torch.arange(6, dtype=torch.int32)
    own, level = PagedPart(torch.empty(1, 4, 6, 32), torch.empty(1, 4, 6)), (torch.empty(3, 4, 5, 32), torch.empty(3, 4, 5))
    out, lse = joined.run_join(q, [own, PagedPart(*level, place)], torch.empty(4))
    assert (out.dtype, out.shape, lse.shape) == (q.dtype, q.shape, q.shape[:3])
    ((tensors, (launch,)),) = kept
    known = {id(x) for x in tensors if x is not None}
    assert len(known) == 8 and {id(x) for x in leaves(launch.args)} == known


def test_a_prefix_that_many_share() -> None:
    """Rows of all sequences in tiles of 128, and as many parts as give every multiprocessor of an H200 one program."""
    tiles = plan.tiles(problem(64, 1, 32768, 16, mask=None, partial=True), H200)
    tile = tiles["decode"]
    assert (tile.sizes, tile.warps, tile.splits) == ((128, 128), 8, 8)
    assert 0.9 * H200.units < 64 * 4 // 128 * 8 * tile.splits <= H200.units
    fewer = plan.tiles(problem(16, 1, 32768, 16, mask=None, partial=True), H200)["decode"]
    assert fewer.sizes == (64, 64) and fewer.splits * 8 <= H200.units


def test_room_of_what_is_shared() -> None:
    """Keys are split from the pages that a prefix has, not from all that the table has room for."""
    built = build([1] * 4, [520] * 4)
    built.table[1:, :32] = built.table[0, :32]
    cache, noted = tw.KVCache.paged(*built.pages, built.table, built.cache.lengths), list[int]()
    plan, before = tw.plan_cached(cache), cached_call.problem_of

    def note(call: Any) -> Any:
        noted.append(before(call)[0].seqlen_k)
        rows = call.queries.q.shape
        return torch.zeros(1, rows[1], rows[0], 32), torch.zeros(1, rows[1], rows[0])

    call = cached_call.parse_cached(built.q[:, None], cache, None, {**DEFAULTS, "mask": None}, None, plan, False)
    cached_call.attended(call, plan, note)
    assert noted == [4 * (built.table.shape[1] - 32) * 16, 32 * 16]


def problem(rows: int, batch: int, keys: int, page: int, **more: Any) -> Problem:
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "mask": tw.causal(), "varlen": True, "device": "cuda"}
    return Problem.of(**{**sizes, "batch": batch, "seqlen": rows * batch, "kv_seqlen": keys * batch, "page": page, **more})


def test_plans_of_caches() -> None:
    """Few queries a sequence are decoded, their keys split from what the table has room for; more are a forward's."""
    few = plan.tiles(problem(1, 1, 32768, 16), H200)
    assert list(few) == ["decode", "merge"] and few["decode"].splits > 8 and few["decode"].heads == 4
    assert plan.tiles(problem(1, 256, 4096, 16), H200)["decode"].splits == 1
    asked = plan.tiles(problem(1, 256, 4096, 16, splits=5), H200)
    assert asked["decode"].splits == 5 and "5 parts are yours" in asked["decode"].reasons
    many = plan.tiles(problem(512, 2, 4096, 16), H200)
    assert list(many) == ["forward"] and many["forward"].pack_gqa
    narrow, wide = (plan.tiles(problem(1, 64, 4096, 16, stored=stored), H200)["decode"] for stored in ("int8", ""))
    assert narrow.on_chip_bytes < 0.6 * wide.on_chip_bytes
    text = str(tw.plan(problem(1, 16, 32768, 16), device="h200"))
    assert "triton" in text and "its kernels read no pages" in str(tw.explain(problem(1, 16, 32768, 16), device="h200"))


@pytest.mark.parametrize("name", ["a100-80", "h200", "b200", "rtx5090", "mi300x"])
def test_a_tile_fits_every_cache(name: str) -> None:
    """Also latents of 576 columns with 128 heads, of few rows and of many; in fp32 where shared memory is large."""
    spec = device(name)
    for heads, dims in (((128, 1), (576, 512)), ((16, 1), (576, 512)), ((8, 1), (512, 512)), ((8, 8), (256, 256))):
        for rows in (1, 4, 600):
            for dtype in ("bfloat16", "float32") if name in ("a100-80", "h200", "b200") else ("bfloat16",):
                sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": dims[0], "head_dim_v": dims[1], "dtype": dtype}
                one = problem(rows, 2, 8192, 64, **sizes)
                verdict = plan.supports(one, spec)
                assert verdict.ok, (sizes, rows, verdict.reasons)
                assert {"decode", "forward"} & set(plan.tiles(one, spec))
