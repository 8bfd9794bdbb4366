"""Caches on a GPU: graphs, growing lengths, new tokens, garbage in tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.cache.caches import build, worst
from tests.cache.narrow import checks
from tests.cache.test_cached import MIXED, OPTIONS, attend
from tilewise.api import cached_call

pytestmark = pytest.mark.gpu
HALF: dict[str, Any] = {"dtype": torch.bfloat16, "dims": (128, 128), "heads": (8, 2), "device": "cuda"}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "double"])
def test_options(name: str) -> None:
    options = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[name].items()}
    if "alibi" in name:
        options["bias"] = tw.alibi(OPTIONS[name]["bias"].slopes.cuda())
    rows = [min(m, n) for m, n in zip(*MIXED, strict=True)]
    built = build(rows, MIXED[1], dtype=torch.bfloat16, device="cuda")
    out, lse = attend(built, "triton", **options)
    assert worst(built, out, lse, **OPTIONS[name]) <= 1.0


@pytest.mark.parametrize("name", checks())
def test_narrow(name: str) -> None:
    """int8 and e4m3, two columns at a time where that is possible."""
    checks("cuda")[name]()


def test_kernels_read_pages_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cached_call, "gathered")
    for page in (1, 3, 16, 64, 256):
        built = build([1, 5, 0, 130], [1000, 77, 3, 200], page=page, **HALF)
        out, lse = attend(built, "auto")
        assert worst(built, out, lse) <= 1.0, page


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn])
def test_one_graph_serves_growing_lengths(stored: torch.dtype | None) -> None:
    """New tokens, turned and written in the graph; recycled places hold NaN until then."""
    built = build([1, 1, 1], [900, 17, 300], stored=stored, **HALF)
    cache, q = built.cache, built.q[:, None]
    lengths = torch.tensor([800, 10, 290], dtype=torch.int32, device="cuda")
    cache = tw.KVCache(cache.pages._replace(lengths=lengths))
    angles = torch.arange(1024, device="cuda")[:, None] * torch.rand(64, device="cuda")
    rotary = tw.rotary(angles.cos(), angles.sin())
    k, v = (torch.randn(3, 1, 2, 128, device="cuda").bfloat16() for _ in range(2))

    def step() -> torch.Tensor:
        return tw.attention_cached(q, cache, new=(k, v), rotary=rotary)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(5):
        lengths += 1
        k.normal_()
        graph.replay()
        again = step()
        assert torch.equal(out, again) and out.isfinite().all()


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("interleaved", [False, True])
def test_new_tokens_as_torch_writes_them(stored: torch.dtype | None, interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [build([3, 1, 0, 4], [20, 9, 5, 4], stored=stored, page=5, **HALF) for _ in range(2)]
    angles = torch.arange(64, device="cuda")[:, None] * torch.linspace(0.1, 1, 50, device="cuda")
    rotary = tw.rotary(angles.cos(), angles.sin(), interleaved=interleaved)
    torch.manual_seed(0)
    k, v = (torch.randn(8, 2, 128, device="cuda").bfloat16() for _ in range(2))
    for built in made:
        out = tw.attention_cached(built.q, built.cache, new=(k, v), rotary=rotary, cu_seqlens_q=built.cu)
        # what was attended to is what pages hold now; those of the two writers may be a step of the dtype apart
        again = tw.attention_cached(built.q, built.cache, rotary=rotary, cu_seqlens_q=built.cu)
        assert torch.allclose(out.float(), again.float(), atol=2**-7, rtol=2**-7)
        monkeypatch.setattr("tilewise.dispatch.pages_writer", lambda *_: None)
    for one, other in zip(*(built.pages for built in made), strict=True):
        apart = (one.float().nan_to_num(9.0) - other.float().nan_to_num(9.0)).abs()
        limit = 1.0 if stored == torch.int8 else 0.126 * other.float().nan_to_num(9.0).abs() if stored else None
        limit = other.float().nan_to_num(9.0).abs() * 2**-7 if limit is None else limit
        assert bool((apart <= limit).all())


def test_garbage_in_tables_and_lengths() -> None:
    """Unchecked on a GPU: nothing outside is touched, other sequences are right."""
    built = build([1, 2, 1], [40, 30, 20], page=8, **HALF)
    want = attend(built, "auto")[0]
    pages = built.cache.pages
    pages.table[1] = 10**9
    pages.lengths[2] = 2**31 - 1
    out = attend(built, "auto")[0]
    torch.cuda.synchronize()
    assert torch.equal(out[0], want[0])
    cache = built.cache
    cache.append(torch.zeros(3, 1, 2, 128, device="cuda"), torch.zeros(3, 1, 2, 128, device="cuda"))
    torch.cuda.synchronize()


def test_drafts() -> None:
    built = build([7, 5, 3], [300, 12, 900], **HALF)
    mask = tw.causal() & tw.window(200) & tw.tree([[-1, 0, 0, 1, -2], [-1, -1, 0, 1, 2], [-1, 0, 1, 2, 3]])
    out, lse = attend(built, "triton", mask=mask)
    assert worst(built, out, lse, mask=mask) <= 1.0


@pytest.mark.parametrize("page", [16, 64])
def test_the_bits_of_a_row_are_its_own(page: int) -> None:
    """In a prefill, in chunks, as decode, beside other sequences, with tables of both forms; by programs that share the parts of
    a row and, in prefill, by one that has all of them."""
    built = build([1300, 700], [1300, 700], page=page, **HALF)
    whole, whole_lse = attend(built, "triton", invariant=True)
    table = built.cache.pages.table
    csr = torch.arange(3, dtype=torch.int32, device=table.device) * table.shape[1], table.flatten()
    for rows, lengths in (([1, 1], [1300, 700]), ([1, 400], [1300, 555]), ([130, 0], [777, 700]), ([1, 1], [513, 1])):
        lengths_now = torch.tensor(lengths, dtype=torch.int32, device=built.q.device)
        at = [range(lengths[0] - rows[0], lengths[0]), range(1300 + lengths[1] - rows[1], 1300 + lengths[1])]
        own = torch.tensor([*at[0], *at[1]], device=built.q.device)
        cu = torch.tensor([0, rows[0], sum(rows)], dtype=torch.int32, device=built.q.device)
        for given in (table, csr):
            cache = tw.KVCache.paged(*built.pages, given, lengths_now)
            same: dict[str, Any] = {"cu_seqlens_q": cu, "invariant": True, "return_lse": True, "backend": "triton"}
            out, lse = tw.attention_cached(built.q[own], cache, **same)
            assert torch.equal(out, whole[own]) and torch.equal(lse, whole_lse[:, own]), (rows, lengths)


def test_a_graph_with_a_plan() -> None:
    """After a first call nothing comes from the host."""
    built = build([1, 1, 1], [400, 450, 200], page=16, **HALF)
    built.cache.pages.table[1, :20] = built.cache.pages.table[0, :20]
    plan = tw.plan_cached(built.cache)
    assert plan.levels
    q = built.q[:, None]
    want = tw.attention_cached(q, built.cache, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention_cached(q, built.cache, plan=plan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    del plan  # what the graph reads of it stays
    taken = [torch.full((size,), 1 << 30, dtype=torch.int32, device="cuda") for size in range(1, 300)]
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want) and taken
