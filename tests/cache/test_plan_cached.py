"""Shared prefixes: found from equal leading pages, read once, and the result is that of reading them for each sequence."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.cache.caches import Built, worst
from tilewise.api import cached_write
from tilewise.api.cached_plan import CachedPlan, SharedPages
from tilewise.backends.gpu import captured

PAGE = 4


def shared(
    tables: list[list[int]], lengths: list[int], rows: list[int], dtype: torch.dtype = torch.float32, csr: bool = False
) -> Built:
    """A cache of pages of PAGE tokens with these tables; what is behind a length is NaN."""
    g = torch.Generator().manual_seed(1)
    count = max([0, *(page for table in tables for page in table)]) + 1
    k_pages, v_pages = (torch.randn((count, PAGE, 2, 16), generator=g).to(dtype) for _ in range(2))
    most = max(map(len, tables))
    table = torch.tensor([[*own, *[-1] * (most - len(own))] for own in tables], dtype=torch.int32)
    indptr = torch.tensor([0, *map(len, tables)]).cumsum(0).int()
    given_table: Any = (indptr, torch.tensor([page for own in tables for page in own], dtype=torch.int32)) if csr else table
    cache = tw.KVCache.paged(k_pages, v_pages, given_table, torch.tensor(lengths, dtype=torch.int32))
    k, v = (
        [x[torch.tensor(own, dtype=torch.long)].flatten(0, 1)[:n].double() for own, n in zip(tables, lengths, strict=True)]
        for x in (k_pages, v_pages)
    )
    q = torch.randn((sum(rows), 4, 16), generator=g).to(dtype)
    return Built(cache, q, torch.tensor([0, *rows]).cumsum(0).int(), k, v, table, (k_pages, v_pages))


NESTED = [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7], [0, 1, 2, 5, 6, 8], [9, 10, 11], [9, 10, 12]]
LENGTHS = [20, 23, 24, 11, 12]


def test_what_is_shared_is_found() -> None:
    """The longest common runs, one inside the other; pages of the queries are not among them."""
    built = shared(NESTED, LENGTHS, [1] * 5)
    plan = tw.plan_cached(built.cache, least=8)
    assert plan.levels == ((SharedPages((0, 1, 2), 0, 3), SharedPages((3, 4), 0, 2)), (SharedPages((1, 2), 3, 5),))
    assert plan.shared == [3, 5, 5, 2, 2] and plan.pages == 23 and plan.pages_read == 13
    assert str(plan).splitlines()[0] == "5 sequences: 13 of 23 pages of 4 are read"
    assert "3 share pages 0 to 2 of their tables (12 tokens)" in str(plan)
    # what is too short for itself counts with what follows it
    assert tw.plan_cached(built.cache, least=16).levels == ((SharedPages((1, 2), 0, 5),),)
    assert tw.plan_cached(built.cache).levels == ()
    # five queries reach into the fifth page of the second and third sequence
    assert tw.plan_cached(built.cache, least=4, queries=5).shared == [3, 4, 4, 1, 1]


def test_a_call_with_a_plan_leaves_others_of_its_shape_as_they_are() -> None:
    """Its parts are computed in fp32; the same call without a plan gives q's dtype, after it and before it."""
    built = shared(NESTED, LENGTHS, [1] * 5, torch.bfloat16)
    plan = tw.plan_cached(built.cache, least=8)
    for some in (plan, None, plan):
        out, lse = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, plan=some, return_lse=True)
        assert out.dtype == torch.bfloat16
        assert worst(built, out, lse) <= 1.0


TREE = tw.causal() & tw.tree(torch.tensor([[-1, 0, -2]]).expand(5, 3))
OPTIONS: dict[torch.dtype, list[dict[str, Any]]] = {
    torch.float32: [{}, {"mask": None}, {"mask": TREE}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}],
    torch.bfloat16: [{}],
}


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("dtype", OPTIONS)
def test_conformance(backend: str, dtype: torch.dtype) -> None:
    for rows in ([1] * 5, [3, 0, 2, 1, 3]):
        built = shared(NESTED, LENGTHS, rows, dtype)
        plan = tw.plan_cached(built.cache, least=4, queries=3)
        assert plan.levels
        for options in OPTIONS[dtype]:
            named: dict[str, Any] = {"mask": tw.causal(), **options}
            out, lse = tw.attention_cached(
                built.q, built.cache, cu_seqlens_q=built.cu, plan=plan, return_lse=True, backend=backend, **named
            )
            assert out.dtype == dtype and worst(built, out, lse, **named) <= 1.0, named


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("rows", [1, 2])
def test_even_batches(backend: str, rows: int) -> None:
    """As many queries in each sequence: of all sequences, whose rows stay where they are, and of some."""
    for tables, lengths in ((NESTED, LENGTHS), ([[0, 1, 2, n] for n in range(3, 6)], [14, 15, 16])):
        built = shared(tables, lengths, [rows] * len(tables))
        plan = tw.plan_cached(built.cache, least=4, queries=2)
        q = built.q.unflatten(0, (-1, rows))
        out, lse = tw.attention_cached(q, built.cache, plan=plan, return_lse=True, backend=backend)  # type: ignore[call-overload]
        assert worst(built, out.flatten(0, 1), lse.transpose(0, 1).flatten(1)) <= 1.0


def test_what_is_not_seen_alike_is_not_shared() -> None:
    """Then the plan is not used, and the bits are those without."""
    built = shared(NESTED, LENGTHS, [1] * 5)
    plan = tw.plan_cached(built.cache, least=8)
    for options in (
        {"mask": tw.causal() & tw.window(9)},
        {"mask": tw.causal() | tw.prefix(3)},
        {"bias": tw.alibi(torch.rand(4))},
        {"bias": torch.randn(5, 4, 1, 24)},
    ):
        named: dict[str, Any] = options
        with_plan = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, plan=plan, **named)
        assert torch.equal(with_plan, tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, **named))


def test_shared_pages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels' calls: each page that is shared is in one sequence of one call."""
    from tilewise.backends.cpu.backend import CpuBackend

    read: list[int] = []
    before = CpuBackend.paged

    def counted(self: Any, problem: Any, inputs: Any, pages: Any) -> Any:
        for start, length in zip(pages.starts.tolist(), pages.seen.tolist(), strict=True):
            read.extend(pages.entries[start : start - (-length // PAGE)].tolist())
        return before(self, problem, inputs, pages)

    monkeypatch.setattr(CpuBackend, "paged", counted)
    built = shared(NESTED, LENGTHS, [1] * 5)
    plan = tw.plan_cached(built.cache, least=4)
    tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, plan=plan, backend="cpu")
    assert sorted(read) == list(range(13)) and plan.pages_read == 13


@st.composite
def drawn_tables(draw: Any) -> tuple[list[list[int]], list[int], list[int]]:
    tables: list[list[int]] = []
    fresh = 0
    for _ in range(draw(st.integers(1, 6))):
        head: list[int] = []
        if tables:
            source = draw(st.sampled_from(tables))
            head = source[: draw(st.integers(0, len(source)))]
        own = draw(st.integers(0 if head else 1, 3))
        tables.append([*head, *range(fresh, fresh + own)])
        fresh += own
    lengths = [draw(st.integers(0, len(table) * PAGE)) for table in tables]
    rows = [draw(st.integers(0, min(3, n))) for n in lengths]
    return tables, lengths, rows


@settings(max_examples=40, deadline=None)
@given(case=drawn_tables(), least=st.integers(1, 10), csr=st.booleans())
@example(case=([[0, 1], [2], [3], [0, 4]], [7, 0, 0, 7], [0, 0, 0, 0]), least=1, csr=False)  # no queries at all
def test_random_tables(case: tuple[list[list[int]], list[int], list[int]], least: int, csr: bool) -> None:
    tables, lengths, rows = case
    built = shared(tables, lengths, rows, csr=csr)
    plan = tw.plan_cached(built.cache, queries=3, least=least)
    spared = {}
    for level in plan.levels:
        for run in level:
            assert len(run.sequences) > 1 and (run.past - run.first) * PAGE >= least
            assert len({tuple(tables[b][: run.past]) for b in run.sequences}) == 1
            for b in run.sequences:
                assert run.first == spared.get(b, 0) and run.past * PAGE <= lengths[b] - 3
                spared[b] = run.past
    out, lse = tw.attention_cached(built.q, built.cache, cu_seqlens_q=built.cu, plan=plan, return_lse=True)
    assert worst(built, out, lse) <= 1.0


def test_plans_that_do_not_fit() -> None:
    built = shared(NESTED, LENGTHS, [1] * 5)
    plan = tw.plan_cached(built.cache, least=8)
    options: dict[str, Any] = {"cu_seqlens_q": built.cu, "plan": plan}
    with pytest.raises(tw.TilewiseError, match="plan: got dict, need what"):
        tw.attention_cached(built.q, built.cache, **{**options, "plan": {}})
    with pytest.raises(tw.TilewiseError, match="plan: with invariant=True"):
        tw.attention_cached(built.q, built.cache, invariant=True, **options)
    fewer = tw.KVCache.paged(*built.pages, built.table[:4], built.cache.lengths[:4])
    with pytest.raises(tw.TilewiseError, match="made for 5 sequences in pages of 4, but the cache has 4"):
        tw.attention_cached(built.q[:4], fewer, cu_seqlens_q=built.cu[:5], plan=plan)
    five = torch.tensor([0, 5, 10, 15, 20, 25], dtype=torch.int32)
    with pytest.raises(tw.TilewiseError, match="sequence 1 shares 5 pages, but only 4 lie before its queries"):
        tw.attention_cached(torch.randn(25, 4, 16), built.cache, cu_seqlens_q=five, plan=plan)
    built.table[0, 1] = 12
    with pytest.raises(tw.TilewiseError, match=r"sequences \(0, 1, 2\) no longer share pages 0 to 2"):
        tw.attention_cached(built.q, built.cache, **options)
    for bad in ({"queries": -1}, {"least": 0}, {"queries": 1.5}):
        with pytest.raises(tw.TilewiseError, match="plan_cached"):
            tw.plan_cached(built.cache, **bad)
    with pytest.raises(tw.TilewiseError, match="need a KVCache"):
        tw.plan_cached(built.table)  # type: ignore[arg-type]


@pytest.mark.parametrize("capturing", [True, False])
def test_a_graph_keeps_the_integers_it_reads(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    """Whoever drops a plan, or how many steps are asked for: graphs hold addresses alone."""
    monkeypatch.setattr(captured, "_kept", {})
    monkeypatch.setattr(cached_write, "_kept_steps", {})
    plan, device = CachedPlan(2, 4, (), 0), torch.device("cpu")
    cached_write.even_steps(2, 1, device)
    monkeypatch.setattr(captured, "is_capturing", lambda: capturing)
    read = [weakref.ref(plan.kept("shared", device, lambda: [1, 2])), weakref.ref(cached_write.even_steps(2, 1, device))]
    monkeypatch.setattr(captured, "is_capturing", lambda: False)
    for rows in range(cached_write.KEPT_STEPS + 1):
        cached_write.even_steps(3, rows, device)
    del plan
    gc.collect()
    assert [one() is not None for one in read] == [capturing] * 2
