"""Attention over caches by the Triton kernels in the interpreter, as a program of its own: see `tests/backends/interpreted.py`.

    TRITON_INTERPRET=1 python -m tests.cache.interpreted 0 2       every second of the cases that tests run, from the first
    TRITON_INTERPRET=1 python -m tests.cache.interpreted int8      the cases of that name
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch

import tilewise as tw
from tests.cache.caches import build, worst
from tests.cache.test_cached import CASES, MIXED, OPTIONS, attend
from tests.cache.test_invariant import same_bits, sequences
from tests.cache.test_tree import PARENTS
from tilewise import dispatch
from tilewise.api import cached_call
from tilewise.backends.pages import NewTokens, gathered
from tilewise.backends.triton import paged, plan
from tilewise.backends.triton.fixed import PARTS

LEFT_OUT = {"float64", "double"}
"""Kernels here sum in float32."""
OFTEN = (
    *("decode, eight heads a key head", "chunks", "pages of one", "pages of three", "one page", "csr", "columns apart, decode"),
    *("latent", "empty sequences", "more rows than keys", "float16 decode", "int8 latent", "float8 decode"),
    *("prefix or window", "sinks", "bias", "alibi of each sequence"),
    *("append int8", "append float8", "append and turn some", "append and turn neighbours", "places", "garbage", "shared"),
    *("drafts", "many parts", "invariant", "invariant, split"),
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


def invariant(split: bool) -> None:
    """Rows have the bits that they have in a prefill of their sequence alone, whether programs have a part each or all parts."""
    cached_call.gathered = None  # type: ignore[assignment]
    plan.SPAN = paged.SPAN = 64
    plan.MOST_HELD = (1 << 28) if split else 0
    options = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "backend": "triton"}
    made = sequences([5, 100], 16, torch.float32, options)
    if split:  # all have room for as many keys, so that the parts of each are known
        k, v, tables = made.caches[16]
        cache = tw.KVCache.paged(k, v, tables[1][None], torch.tensor([100]))
        with mock.patch.object(paged, "merge_launch", wraps=paged.merge_launch) as merged:
            out = tw.attention_cached(made.q[1][None, -1:], cache, invariant=True, **options)  # type: ignore[call-overload]
        assert merged.call_count == 1 and torch.equal(out[0, 0], made.results[1][0][-1])
    for seed in range(1 if split else 2):
        same_bits(made, seed, options)
    for name in () if split else ("int8",):
        built = build(**CASES[name])
        out, lse = attend(built, "triton", invariant=True)
        assert worst(built, out, lse) <= 1.0, name


WRITER = dispatch.pages_writer
WRITES: dict[str, Any] = {
    "append": (False, 0, 16, torch.float32, None),
    "append int8": (False, 0, 3, torch.float32, torch.int8),
    "append float8": (False, 0, 8, torch.bfloat16, torch.float8_e4m3fn),
    "append and turn": (False, 32, 16, torch.bfloat16, None),
    "append and turn some": (False, 20, 5, torch.float32, None),
    "append and turn neighbours": (True, 20, 5, torch.float16, torch.int8),
}


def main() -> int:
    checks: dict[str, Callable[[], None]] = {}
    for name in (*CASES, *OPTIONS):
        if name not in LEFT_OUT:
            checks[name] = partial(conform, name)
    checks |= {name: partial(turned_and_written, *how) for name, how in WRITES.items()}
    checks |= {"places": places, "garbage": garbage, "shared": shared, "drafts": drafts, "many parts": many_parts}
    checks |= {"invariant": partial(invariant, False), "invariant, split": partial(invariant, True)}
    words = sys.argv[1:]
    if words[0].isdigit():
        names = [*OFTEN[int(words[0]) :: int(words[1])]]
    else:
        names = [name for name in checks if any(word in name for word in words)]
    failed = 0
    for name in names:
        start = time.perf_counter()
        try:
            checks[name]()
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: FAILED\n{traceback.format_exc()[-1500:]}", flush=True)
    return failed


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
