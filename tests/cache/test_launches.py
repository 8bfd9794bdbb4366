"""Launches over caches on the host: repeated calls move every tensor, plans are those of the call."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.cache.caches import build
from tilewise.backends.pages import NewTokens, Turning
from tilewise.backends.triton import paged, plan, run
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
