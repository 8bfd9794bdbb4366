"""Cases over a cache: the memory that contenders read, the calls that are timed, and what a right result of them is.

All contenders of a case read the same memory, each in its own form: pages of any size, or a row for each sequence. A call reads
other bytes than the ones before it: several caches take turns, so that none is found in the L2 or L3 of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise as tw
from tilewise import masks
from tilewise.api.rotary import RotaryTable
from tilewise.backends.base import Inputs
from tilewise.errors import TilewiseError
from tilewise.hardware.timers import Clock
from tilewise.lab.bench.cases import Cache, Case
from tilewise.lab.bench.child import Outcome
from tilewise.lab.bench.judge import Judgement, compare, row_block, sample_rows
from tilewise.lab.bench.timing import Timer
from tilewise.numerics import bounds
from tilewise.numerics.oracle import oracle
from tilewise.numerics.rounding import Arithmetic, unit_roundoff
from tilewise.problem import Problem

COLD = {"cuda": 2**31, "cpu": 2**28}
"""Bytes that the caches which take turns hold together: many times what stays in an L2 or L3."""
MOST_COPIES = 512
HEADS_JUDGED, TOKENS_JUDGED = (4, 16), {"cuda": 2**21, "cpu": 2**16}
"""Key heads that are recomputed, over all sequences, at least and at most; and their tokens together, beyond the least."""
BLOCK = 2**24
"""Numbers that are drawn at a time for a dtype that draws none itself."""
SHORTEST = 16
"""The longest of mixed lengths in the shortest."""


def cache_of(case: Case) -> Cache:
    assert case.cache is not None
    return case.cache


def lengths_of(case: Case) -> list[int]:
    """Tokens of each sequence; mixed ones are drawn evenly in their logarithm, the same on every machine."""
    most, numbers = case.kv_seqlen or case.seqlen, Random(2026)
    if not cache_of(case).mixed:
        return [most] * case.batch
    return [most, *(max(case.seqlen, int(most * SHORTEST ** -numbers.random())) for _ in range(case.batch - 1))]


def bytes_read(case: Case) -> int:
    """Of K and V, by one call: each token once, what is shared once with a plan and once a sequence without."""
    problem, cache = case.problem(), cache_of(case)
    tokens = sum(lengths_of(case)) - (case.batch - 1) * (cache.shared if cache.plan else 0)
    return tokens * problem.kv_heads * (problem.head_dim + problem.head_dim_v) * (1 if cache.stored else problem.itemsize)


def copies_of(case: Case) -> int:
    """Caches that take turns."""
    return min(MOST_COPIES, -(-COLD[_kind(case)] // max(1, bytes_read(case))))


def _kind(case: Case) -> str:
    return case.device.partition(":")[0]


def pages_of(case: Case) -> tuple[int, list[int]]:
    """Of one cache: pages that all share, and how many each sequence has, those included."""
    cache = cache_of(case)
    assert cache.shared % cache.page == 0 and cache.shared <= min(lengths_of(case)) - case.seqlen
    return cache.shared // cache.page, [-(-n // cache.page) for n in lengths_of(case)]


def tokens_held(case: Case) -> int:
    """By all caches that take turns."""
    if not cache_of(case).page:
        return copies_of(case) * case.batch * max(lengths_of(case))
    shared, counts = pages_of(case)
    return copies_of(case) * (shared + sum(counts) - case.batch * shared) * cache_of(case).page


def tables_of(case: Case) -> Tensor:
    """(copies, B, most): pages at random places, or one after the other; 0 where a sequence has none."""
    (shared, counts), copies = pages_of(case), copies_of(case)
    total, most = tokens_held(case) // cache_of(case).page, torch.arange(max(counts))
    generator = torch.Generator().manual_seed(total)
    numbers = torch.arange(total) if cache_of(case).in_order else torch.randperm(total, generator=generator)
    table = torch.zeros((copies, case.batch, len(most)), dtype=torch.int32)
    common, own = numbers.int().split([copies * shared, total - copies * shared])
    table[:, :, :shared] = common.view(copies, 1, shared)
    table[:, (most >= shared) & (most < torch.tensor(counts)[:, None])] = own.view(copies, -1)
    return table


class Pool(NamedTuple):
    """Keys and values (tokens, Hk, D), and what int8 and float8 ones are multiplied by."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


_pools: dict[tuple[Any, ...], Pool] = {}
"""Of each dtype and width the largest so far: the cases of a suite read the same memory."""


def pool_of(case: Case, tokens: int) -> Pool:
    """So many tokens: unit-normal ones, or numbers that are about so after their scales."""
    problem, stored = case.problem(), cache_of(case).stored
    key = (problem.kv_heads, problem.head_dim, problem.head_dim_v, stored or problem.dtype, case.device)
    found = _pools.get(key)
    if found is None or found.k.shape[0] < tokens:
        _pools.pop(key, None)
        del found
        if case.device.startswith("cuda"):
            torch.cuda.empty_cache()
        generator = torch.Generator(case.device).manual_seed(2026)
        k, v = (_drawn((tokens, problem.kv_heads, dim), key[3], generator) for dim in key[1:3])
        _pools[key] = Pool(k, v, *(_scale(k, generator) if stored else None for _ in range(2)))
    return _pools[key]


def forget_pools() -> None:
    """Give the memory back."""
    _pools.clear()


def _drawn(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> Tensor:
    x = torch.empty(shape, dtype=getattr(torch, dtype), device=generator.device)
    if dtype in ("float32", "float16", "bfloat16", "float64"):
        return x.normal_(generator=generator)
    for part in x.view(-1).split(BLOCK):
        drawn = torch.empty(part.shape, device=x.device).normal_(generator=generator)
        part.copy_((drawn * 40).round_().clamp_(-127, 127) if dtype == "int8" else drawn)
    return x


def _scale(x: Tensor, generator: torch.Generator) -> Tensor:
    """Of each token and head for int8, of each head for float8."""
    shape, most = (x.shape[:2], 1 / 40) if x.dtype == torch.int8 else (x.shape[1:2], 1.0)
    return (torch.rand(shape, generator=generator, device=x.device) + 0.5) * most


class CacheTensors:
    """The inputs of a case over a cache, for every form that a contender reads."""

    def __init__(self, case: Case) -> None:
        problem = case.problem()
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int, dim: int) -> Tensor:
            shape = (problem.batch, problem.seqlen_q, heads, dim)
            return torch.randn(shape, generator=generator).to(case.device, getattr(torch, problem.dtype))

        self.case = case
        self.q = draw(problem.heads, problem.head_dim)
        self.new = draw(problem.kv_heads, problem.head_dim), draw(problem.kv_heads, problem.head_dim_v)
        self.lengths = torch.tensor(lengths_of(case), dtype=torch.int32, device=case.device)
        self.made: dict[Cache, list[tw.KVCache]] = {}

    @cached_property
    def rotary(self) -> RotaryTable:
        most, dim = int(self.lengths.max()), self.q.shape[3]
        angles = torch.arange(most)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        return tw.rotary(angles.cos().to(self.q.device), angles.sin().to(self.q.device))

    def caches(self, case: Case) -> list[tw.KVCache]:
        """Those that take turns, in the form of a case; made once, for a larger form may draw other numbers."""
        key = cache_of(case)
        if key not in self.made:
            self.made[key] = self._caches(case)
        return self.made[key]

    def _caches(self, case: Case) -> list[tw.KVCache]:
        cache, problem, batch = cache_of(case), case.problem(), case.batch
        pool, page = pool_of(case, tokens_held(case)), cache.page or problem.seqlen_k

        def pages(x: Tensor) -> Tensor:
            x = x[: tokens_held(case)]
            sides = (problem.kv_heads, page) if cache.heads_first else (page, problem.kv_heads)
            x = x.view(len(x) // page, *sides, -1)
            return x.transpose(1, 2) if cache.heads_first else x

        k, v = pages(pool.k), pages(pool.v)
        if not cache.page:
            return [tw.KVCache.static(*both, self.lengths) for both in zip(k.split(batch), v.split(batch), strict=True)]
        scales = [pages(x)[..., 0] if x is not None and x.ndim == 2 else x for x in (pool.k_scale, pool.v_scale)]
        tables = tables_of(case).to(case.device)
        return [tw.KVCache.paged(k, v, one, self.lengths, k_scale=scales[0], v_scale=scales[1]) for one in tables]

    def turned(self, x: Tensor) -> Tensor:
        """The last tokens of each sequence (B, rows, H, D) with their rotary embedding, rounded to their dtype."""
        at = self.lengths[:, None] - x.shape[1] + torch.arange(x.shape[1], device=x.device)
        return self.rotary.apply(x.flatten(0, 1), at.flatten(), x.dtype).view(x.shape)

    def head(self, case: Case, sequence: int, head: int) -> tuple[Problem, Inputs]:
        """One key head of one sequence of the first cache with its query heads, in float64, as a problem of its own."""
        pages, rows, n = self.caches(case)[0].pages, case.seqlen, lengths_of(case)[sequence]
        alone = replace(case, batch=1, heads=case.problem().group, kv_heads=1, kv_seqlen=n, cache=None).problem()
        entries = pages.table[sequence, : -(-n // pages.page)].long()

        def tokens(x: Tensor, scale: Tensor | None, new: Tensor) -> Tensor:
            found = x[entries, :, head].flatten(0, 1)[:n].double()
            if scale is not None:
                found = found * scale[entries, :, head].flatten()[:n, None].double()
            if cache_of(case).new:  # as they are to be written
                found[n - rows :] = new[sequence, :, head].double()
            return found[None, None]

        q, (k, v) = self.q, self.new
        q, k = (self.turned(q), self.turned(k)) if cache_of(case).new else (q, k)
        own = q[sequence, :, head * alone.heads : (head + 1) * alone.heads].transpose(0, 1)[None].double()
        return alone, Inputs(own, tokens(pages.k, pages.k_scale, k), tokens(pages.v, pages.v_scale, v))


def judge(case: Case, given: CacheTensors, out: Tensor) -> Judgement:
    """out (B, Sq, Hq, Dv) over the first cache, in the form of a contender, beside the float64 oracle on some key heads, spread
    over all sequences; the rest must be finite."""
    problem = case.problem()
    shape = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v)
    if tuple(out.shape) != shape or not bool(out.isfinite().all()):
        return Judgement(False, math.inf, math.inf, 0.0)
    total, (least, most) = problem.batch * problem.kv_heads, HEADS_JUDGED
    number = min(most, max(least, TOKENS_JUDGED[_kind(case)] // problem.seqlen_k))
    some = sorted({round(i * (total - 1) / (number - 1)) for i in range(number)})
    results, checked = [], 0
    for sequence, head in (divmod(one, problem.kv_heads) for one in some):
        alone, inputs = given.head(case, sequence, head)
        arithmetic = Arithmetic.of(alone)
        if cache_of(case).stored:  # a number times its scale is rounded once
            arithmetic = replace(arithmetic, operand=unit_roundoff(torch.float32))
        for first, past in sample_rows(alone):
            part, those = row_block(alone, inputs, (first, past))
            got = out[sequence, first:past, head * alone.heads : (head + 1) * alone.heads].transpose(0, 1)[None]
            results.append((got, oracle(part, those)[0], bounds.forward(part, those, arithmetic).out))
            checked += (past - first) * alone.heads
    return compare(results, checked / max(1, problem.batch * problem.seqlen_q * problem.heads))


class Turns:
    """A contender's calls over one cache after the other, in its form of a case; `call` takes the number of one. In a CUDA graph
    all of them are one replay, and its time is divided by their number."""

    def __init__(self, form: Case, call: Callable[[int], Tensor]) -> None:
        copies, graph = copies_of(form), cache_of(form).graph and form.device.startswith("cuda")
        self.calls = copies if graph else 1
        numbers = cycle(range(copies))
        self.run: Callable[[], Tensor] = captured(call, copies) if graph else lambda: call(next(numbers))

    def __call__(self) -> Outcome:
        return Outcome(self.run())

    def timer(self, clock: Clock) -> Timer:
        return lambda number: clock(self.run, -(-number // self.calls)) / self.calls


def captured(call: Callable[[int], Tensor], copies: int) -> Callable[[], Tensor]:
    """A graph of the calls over all caches; a replay gives what the first of them computed. With it goes the call, which owns
    what the graph reads."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for copy in (*range(copies), 0):  # what is compiled, allocated or copied from the host once is no part of the graph
            call(copy)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = call(0)
        for copy in range(1, copies):
            call(copy)
    first.fill_(math.nan)  # a replay that writes nothing is wrong
    return partial(_replayed, graph, first, call)


def _replayed(graph: torch.cuda.CUDAGraph, first: Tensor, owner: object) -> Tensor:
    graph.replay()
    return first


def call_over(case: Case, given: CacheTensors) -> Callable[[int], Tensor]:
    """Our call over each of the caches, as the case has it."""
    cache = cache_of(case)
    caches = given.caches(case)
    plans = [tw.plan_cached(one, queries=case.seqlen) if cache.plan else None for one in caches]
    options: dict[str, Any] = {"mask": masks.parse(case.mask), "scale": case.scale, "softcap": case.softcap}
    options |= {"invariant": cache.invariant, "backend": case.backend}
    options |= {"new": given.new, "rotary": given.rotary} if cache.new else {}
    return lambda copy: tw.attention_cached(given.q, caches[copy], plan=plans[copy], **options)


def chosen_over(case: Case) -> dict[str, Any]:
    """What stands behind plain `tilewise`: who serves the call, and its launches; or why that cannot be told."""
    try:
        given, cache = CacheTensors(case), cache_of(case)
        first = given.caches(case)[0]
        plan = tw.plan_cached(first, queries=case.seqlen) if cache.plan else None
        options: Any = {"mask": masks.parse(case.mask), "plan": plan, "invariant": cache.invariant, "backend": case.backend}
        shown = tw.explain(given.q, first, **options).to_dict()
    except (TilewiseError, RuntimeError) as error:  # a record of times is worth more than its plan
        return {"backend": "unknown", "no_plan": f"{type(error).__name__}: {error}"}
    return {"backend": shown["backend"], "pages": shown["pages"], "launches": shown["launches"]}
