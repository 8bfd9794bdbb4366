"""Attention over caches by the Triton kernels in the interpreter, as a program of its own: see `tests/backends/interpreted.py`.

    TRITON_INTERPRET=1 python -m tests.cache.interpreted 0 2       every second of the cases that tests run, from the first
    TRITON_INTERPRET=1 python -m tests.cache.interpreted int8      the cases of that name
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch

import tilewise as tw
from tests.cache.caches import build, worst
from tests.cache.program import run_checks
from tests.cache.test_cached import CASES, MIXED, OPTIONS, attend
from tests.cache.test_invariant import OF_ROWS, same_bits, sequences
from tests.cache.test_invariant import attend as attend_rows
from tests.cache.test_plan_cached import LENGTHS, NESTED
from tests.cache.test_plan_cached import shared as tables_of
from tests.cache.test_tree import PARENTS
from tilewise import dispatch
from tilewise.api import cached_call, cached_plan
from tilewise.backends.gpu.arguments import partial_results
from tilewise.backends.gpu.record import recorder
from tilewise.backends.pages import NewTokens, PagedPart, gathered
from tilewise.backends.triton import joined, paged, plan
from tilewise.backends.triton.fixed import PARTS

LEFT_OUT = {"float64", "double"}
"""Kernels here sum in float32."""
OFTEN = (
    *("decode, eight heads a key head", "chunks", "pages of one", "pages of three", "one page", "csr", "columns apart, decode"),
    *("latent", "empty sequences", "more rows than keys", "float16 decode", "int8 latent", "float8 decode"),
    *("prefix or window", "sinks", "bias", "alibi of each sequence"),
    *("append int8", "append float8", "append and turn some", "append and turn neighbours", "places", "garbage", "shared"),
    *("joins", "drafts", "many parts", "even parts", "invariant, window", "invariant, softcap and sinks", "invariant, kinds"),
)
"""What tests run; the others are neighbours of these, and the interpreter takes seconds for each."""
SHORT = ([1, 7, 0, 1, 9], [33, 20, 9, 1, 9])


def conform(name: str) -> None:
    case, options = CASES.get(name, {}), dict(OPTIONS.get(name, {}))
    if not case:
        case = {"rows": SHORT[0], "lengths": SHORT[1]}
    elif case["rows"] == MIXED[0] and case["lengths"] == MIXED[1]:
        case = {**case, "rows": SHORT[0], "lengths": SHORT[1]}
    built = build(**case)
    cached_call.gathered = None  # type: ignore[assignment]  # no token is copied
    out, lse = attend(built, "triton", **options)
    assert out.dtype == built.q.dtype and not out.isnan().any(), "NaN"
    error = worst(built, out, lse, **options)
    assert error <= 1.0, f"{error} of the bound"


def turned_and_written(interleaved: bool, turned: int, page: int, dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """The kernel gives and writes what torch does, to a rounding of the dtype; without a rotation, the same bits."""
    cached_call.gathered = gathered
    given = {"page": page, "dtype": dtype, "stored": stored, "dims": (32, 24), "heads": (8, 2)}
    made = [build([3, 1, 0, 4], [20, 9, 5, 4], seed=3, **given) for _ in range(2)]  # type: ignore[arg-type]
    angles = torch.arange(64)[:, None] * torch.rand(max(1, turned // 2), generator=torch.Generator().manual_seed(1))
    rotary = tw.rotary(angles.cos(), angles.sin(), interleaved=interleaved) if turned else None
    g = torch.Generator().manual_seed(2)
    k, v = (torch.randn(8, 2, n, generator=g).to(dtype) for n in (32, 24))
    outs = []
    for one, backend in zip(made, ("tiled", "triton"), strict=True):
        dispatch.pages_writer = (lambda *_: None) if backend == "tiled" else WRITER
        outs.append(tw.attention_cached(one.q, one.cache, new=(k, v), rotary=rotary, cu_seqlens_q=one.cu, backend=backend))
    step = torch.finfo(dtype).eps * (1 if stored is None else 4096)
    for one, other in zip(made[0].pages, made[1].pages, strict=True):
        one, other = ((x.view(torch.uint8) if x.element_size() == 1 and x.dtype != torch.int8 else x) for x in (one, other))
        equal = torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0)) if one.is_floating_point() else torch.equal(one, other)
        if not equal:
            apart = (one.float().nan_to_num(9.0) - other.float().nan_to_num(9.0)).abs()
            assert turned and bool((apart <= (1 if stored else step * one.float().nan_to_num(9.0).abs())).all()), "pages differ"
    assert torch.allclose(outs[0].float(), outs[1].float(), atol=4 * step, rtol=4 * step), "outputs differ"


def places() -> None:
    """Tokens go to the slots given, and those that are no place go nowhere."""
    built = build([1], [20], page=4)
    k_pages, v_pages = built.pages
    before = k_pages.clone()
    k, v = torch.randn(5, 2, 32), torch.randn(5, 2, 32)
    size = built.cache.pages.size
    tokens = NewTokens(k=k, v=v, slots=torch.tensor([7, -1, 0, size, size - 1]))
    dispatch.get("triton").append(built.cache.pages, tokens)
    flat = k_pages.flatten(0, 1)
    assert torch.equal(flat[[7, 0, size - 1]], k[[0, 2, 4]]) and torch.equal(v_pages.flatten(0, 1)[[7, 0]], v[[0, 2]])
    flat[[7, 0, size - 1]] = before.flatten(0, 1)[[7, 0, size - 1]]
    assert torch.equal(k_pages.nan_to_num(9.0), before.nan_to_num(9.0))


def garbage() -> None:
    """Lengths and tables that nobody has checked: nothing outside is read, and a page that is none is another."""
    built = build([1, 2, 1], [40, 30, 20], page=8)
    pages = built.cache.pages
    want = attend(built, "triton")[0]
    table, lengths = pages.table.clone(), pages.lengths.clone()
    pages.table[0, 5:] = 10**6  # behind the last token
    pages.table[1, 3] = -7
    pages.lengths[2] = 10**6
    checks = cached_call.check_table, cached_call.check_lengths
    cached_call.check_table, cached_call.check_lengths = lambda *_: None, lambda *_: None  # type: ignore[assignment]
    got = attend(built, "triton")[0]
    cached_call.check_table, cached_call.check_lengths = checks
    pages.table.copy_(table)
    pages.lengths.copy_(lengths)
    assert torch.equal(got[0], want[0])


def shared() -> None:
    """Pages that sequences share are read once, by a call of their own whose result is merged."""
    built = build([1, 1, 2], [40, 45, 20], page=8, dtype=torch.bfloat16)
    pages = built.cache.pages
    pages.table[1, :4] = pages.table[0, :4]
    for tokens in (built.k, built.v):
        tokens[1][:32] = tokens[0][:32]
    plan = tw.plan_cached(built.cache, queries=1, least=8)
    assert list(plan.shared)[:2] == [4, 4], plan
    out, lse = attend(built, "triton", plan=plan)
    assert worst(built, out, lse) <= 1.0
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    several = [[0, 1, 2, n] for n in range(3, 6)], [14, 15, 16]  # all of them share: their rows come as they are wanted
    for tables, lengths, rows, csr in ((NESTED, LENGTHS, 1, True), (*several, 2, False)):
        built = tables_of(tables, lengths, [rows] * len(tables), torch.bfloat16, csr)
        plan = tw.plan_cached(built.cache, least=8, queries=2)
        with (
            mock.patch.object(paged, "merge_launch", side_effect=AssertionError("merged twice")),
            mock.patch.object(joined, "join_launch", wraps=joined.join_launch) as launched,
        ):
            options: dict[str, Any] = {"sinks": sinks, "plan": plan, "return_lse": True, "backend": "triton"}
            out, lse = tw.attention_cached(built.q.unflatten(0, (-1, rows)), built.cache, **options)
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        assert launched.call_count == 1 and len(launched.call_args[0][0]) == 1 + len(plan.levels)
        assert out.dtype == torch.bfloat16 and worst(built, out, lse, sinks=sinks) <= 1.0, (tables, rows)


def joins() -> None:
    """The kernel that merges launches does what torch does: of many parts, of tokens left out of one, of some that are none."""
    g = torch.Generator().manual_seed(0)
    parts = []
    for count, rows in ((1, 3), (PARTS + 2, 2), (2, 3)):
        lse = torch.randn((count, 2, rows), generator=g)
        lse[torch.rand(lse.shape, generator=g) < 0.3] = float("-inf")
        out = torch.randn((count, 2, rows, 20), generator=g) * (lse > float("-inf"))[..., None]
        place = None if rows == 3 else torch.tensor([1, -1, 0], dtype=torch.int32)
        parts.append(PagedPart(out, lse, place))
    parts[0].lse[0, 0] = torch.tensor([float("-inf"), 0.5, 1.0])
    parts[0].out[0, 0, 0] = 0.0
    for sinks in (None, torch.tensor([0.5, -1.0])):
        got, want = joined.run_join(torch.empty(1, 2, 3, 20), parts, sinks), cached_plan.join_parts(parts, sinks)
        assert all(torch.allclose(x, y, atol=1e-5, rtol=1e-5) for x, y in zip(got, want, strict=True)), sinks


def drafts() -> None:
    """Rows before a tree, all of one and some of one, under a window that counts depths."""
    cached_call.gathered = None  # type: ignore[assignment]
    built = build([7, 5, 3], [30, 12, 90])
    mask = tw.causal() & tw.window(20) & tw.tree(PARENTS)
    options: dict[str, Any] = {"mask": mask, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}
    out, lse = attend(built, "triton", **options)
    assert worst(built, out, lse, **options) <= 1.0


def many_parts() -> None:
    """More parts than are merged at a time, most of a short sequence without a key, and one without a query."""
    cached_call.gathered = None  # type: ignore[assignment]
    built = build([1, 0, 1], [70, 40, 20], dims=(16, 24), heads=(2, 1), page=8)
    options: dict[str, Any] = {"splits": PARTS + 1, "sinks": torch.tensor([0.5, 200.0])}
    with mock.patch.object(paged, "merge_launch", wraps=paged.merge_launch) as merged:
        out, lse = attend(built, "triton", **options)
    assert merged.call_count == 1 and worst(built, out, lse, sinks=options["sinks"]) <= 1.0
    built = build([1], [150], dims=(16, 64), heads=(2, 1), page=8)  # two programs for the columns of a row
    with mock.patch.object(paged, "merge_launch", side_effect=paged.merge_launch) as merged:
        out, lse = attend(built, "triton", **options)
    assert merged.call_args[0][-1].block_k == 2 * PARTS and worst(built, out, lse, sinks=options["sinks"]) <= 1.0


class Kept:
    """Memory for partial results, and what became of it."""

    def __init__(self) -> None:
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, like: torch.Tensor, shape: Sequence[int], splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.results.append(partial_results(like, shape, splits))
        return self.results[-1]


def even_parts() -> None:
    """As many parts as tiles of keys: each has one, from wherever the first key that is seen lies in its tile."""
    cached_call.gathered = None  # type: ignore[assignment]
    built = build([1], [128], dims=(16, 24), heads=(2, 1), page=8)
    for window, parts in ((None, 4), (64, 2), (65, 3)):
        options: dict[str, Any] = {} if window is None else {"mask": tw.causal() & tw.window(window)}
        with mock.patch.object(paged.host, "partial_results", wraps=paged.host.partial_results) as made:
            seen = made.side_effect = Kept()
            out, lse = attend(built, "triton", splits=parts, **options)
        assert len(seen.results) == 1 and bool(seen.results[0][1].isfinite().all()), window
        assert worst(built, out, lse, **options) <= 1.0


@contextmanager
def programs(count: int) -> Iterator[mock.Mock]:
    """So many share the parts of a row, of 64 keys in two blocks; what is not one is merged."""
    plan.SPAN = 64
    planned, get = plan.invariant, recorder.get
    with (
        mock.patch.object(plan, "invariant", lambda *given: replace(planned(*given), splits=count)),
        mock.patch.object(recorder, "get", lambda problem, key, *given: get(problem, None, *given)),
        mock.patch.object(paged, "merge_launch", wraps=paged.merge_launch) as merged,
    ):
        yield merged
    assert bool(merged.call_count) == (count > 1)


def invariant(name: str) -> None:
    """Rows have the bits that they have in a prefill of their sequence alone, on and beside the borders of parts, however many
    programs share these: more than there are, too."""
    cached_call.gathered = None  # type: ignore[assignment]
    options = {**OF_ROWS[name], "backend": "triton"}
    with programs(1):
        made = sequences([5, 140], 16, torch.float32, options)
        same_bits(made, 0, options)
    for count, page in ((2, 16), (5, 7)):
        with programs(count):
            lengths = [64, 65, 127] if count == 2 else [63, 129]
            rows = [1] * len(lengths)
            out, lse = attend_rows(made, page, rows, rows, lengths, options)
            at = torch.tensor(lengths) - 1
            assert torch.equal(out, made.results[1][0][at]) and torch.equal(lse, made.results[1][1][:, at])
            if count == 2:
                same_bits(made, 4, options)


def invariant_kinds() -> None:
    """One program and three give the same bits, which conform: with scales, latents, and a bias, for which parts may be computed
    once more."""
    cached_call.gathered = None  # type: ignore[assignment]
    bias = torch.randn(4, 1, 5, 140, generator=torch.Generator().manual_seed(4))
    bias[..., 70:] = -float("inf")
    given = {"rows": [1, 3, 0, 5], "lengths": [140, 20, 9, 65]}
    int8 = {"stored": torch.int8, "dtype": torch.float16}
    kinds: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        (int8, {}), ({**int8, "latent": True, "dims": (32, 24), "heads": (4, 1)}, {}), ({}, {"bias": bias})
    )  # fmt: skip
    for case, options in kinds:
        built, found = build(**given, **case), []
        for count in (1, 3):
            with programs(count):
                found.append(attend(built, "triton", invariant=True, **options))
        assert worst(built, *found[0], **options) <= 1.0, case
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), case


WRITER = dispatch.pages_writer
WRITES: dict[str, Any] = {
    "append": (False, 0, 16, torch.float32, None),
    "append int8": (False, 0, 3, torch.float32, torch.int8),
    "append float8": (False, 0, 8, torch.bfloat16, torch.float8_e4m3fn),
    "append and turn": (False, 32, 16, torch.bfloat16, None),
    "append and turn some": (False, 20, 5, torch.float32, None),
    "append and turn neighbours": (True, 20, 5, torch.float16, torch.int8),
}


def every_check() -> dict[str, Callable[[], None]]:
    checks: dict[str, Callable[[], None]] = {}
    for name in (*CASES, *OPTIONS):
        if name not in LEFT_OUT:
            checks[name] = partial(conform, name)
    checks |= {name: partial(turned_and_written, *how) for name, how in WRITES.items()}
    checks |= {"places": places, "garbage": garbage, "shared": shared, "joins": joins, "drafts": drafts}
    checks |= {"many parts": many_parts, "even parts": even_parts}
    checks |= {f"invariant, {name}": partial(invariant, name) for name in OF_ROWS} | {"invariant, kinds": invariant_kinds}
    return checks


if __name__ == "__main__":
    sys.exit(run_checks(every_check(), OFTEN, sys.argv[1:]))
