"""`plan_cached`: which sequences of a cache begin with the same pages, so that these are read once for all who share them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.api.cache import KVCache
from tilewise.api.lengths import readable
from tilewise.backends.gpu.captured import keep_if_captured
from tilewise.backends.pages import PagedPart, Pages
from tilewise.errors import ArgumentError, ArgumentTypeError
from tilewise.masks.build import integer
from tilewise.numerics.merge import join_sink, merge_many

LEAST = 256
"""Tokens that a shared run of pages has at least: for fewer, reading them once does not pay for merging."""
Partial = tuple[Tensor, Tensor]
"""out and lse of some keys."""
Attend = Callable[[Tensor, Tensor, Pages, bool], Partial]
Join = Callable[[list[PagedPart]], Partial]


class SharedPages(NamedTuple):
    """Pages [first, past) of the tables of some sequences, which are the same ones."""

    sequences: tuple[int, ...]
    first: int
    past: int


@dataclass(frozen=True)
class CachedPlan:
    """What the sequences of a cache share; made by `plan_cached`. Levels follow each other: what all share comes first, then what
    some of them share after it."""

    batch: int
    page: int
    levels: tuple[tuple[SharedPages, ...], ...]
    pages: int
    """Pages that all sequences have together, each counted as often as it is listed."""
    memory: dict[Hashable, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Integers that calls need on the device."""

    @property
    def pages_read(self) -> int:
        """Pages that are read, those that are shared once."""
        spared = ((len(run.sequences) - 1) * (run.past - run.first) for level in self.levels for run in level)
        return self.pages - sum(spared)

    @cached_property
    def shared(self) -> list[int]:
        """Of each sequence, the leading pages that it shares."""
        counts = [0] * self.batch
        for level in self.levels:
            for run in level:
                for b in run.sequences:
                    counts[b] = run.past
        return counts

    def kept(self, name: Hashable, device: torch.device, make: Callable[[], Sequence[Any]]) -> Tensor:
        """Integers on a device; kept, as a graph that is captured cannot take them from the host."""
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return torch.tensor(make(), dtype=torch.int32, device=device)
        if (name, device) not in self.memory:
            self.memory[name, device] = torch.tensor(make(), dtype=torch.int32, device=device)
        return keep_if_captured(self.memory[name, device])

    def __str__(self) -> str:
        lines = [f"{self.batch} sequences: {self.pages_read:,} of {self.pages:,} pages of {self.page} are read"]
        for run in (run for level in self.levels for run in level):
            lines.append(
                f"  {len(run.sequences)} share pages {run.first:,} to {run.past - 1:,} of their tables "
                f"({(run.past - run.first) * self.page:,} tokens)"
            )
        return "\n".join(lines)


def plan_cached(cache: KVCache, *, queries: int = 1, least: int = LEAST) -> CachedPlan:
    """Find what sequences of a cache share: equal leading pages of their tables, read once for all of them with `plan=`.

    cache: a KVCache. Its table and lengths are read, which waits for a GPU; planning belongs outside of the generation loop.
    queries: the most queries that a sequence will have in a call. The pages of their tokens are not shared.
    least: the fewest tokens that are worth sharing.

    A plan serves as long as the shared pages stay where they are in the tables, while lengths grow. Sharing changes the order of
    sums: results agree to rounding. Calls whose queries see a prefix differently (a window, ALiBi, a bias) do not use it.

    >>> plan = tw.plan_cached(cache)
    >>> print(plan)
    64 sequences: 3,024 of 129,024 pages of 16 are read
      64 share pages 0 to 1,999 of their tables (32,000 tokens)
    >>> out = tw.attention_cached(q, cache, new=(k, v), plan=plan)
    """
    if not isinstance(cache, KVCache):
        raise ArgumentTypeError(f"cache: got {type(cache).__name__}, need a KVCache; see tw.KVCache.paged and .static")
    queries, least = integer("plan_cached: queries", queries, 0), integer("plan_cached: least", least, 1)
    cache.check()
    pages = cache.pages.now()
    entries, starts, lengths = (x.cpu().numpy() for x in (pages.entries, pages.starts, pages.lengths))
    used = -(-lengths // pages.page)
    tables = [entries[start : start + count] for start, count in zip(starts, used, strict=True)]
    whole = [max(0, int(n)) for n in (lengths - queries) // pages.page]
    found: list[list[SharedPages]] = []
    _share(tables, whole, (tuple(range(len(tables))), 0, 0), found, max(1, -(-least // pages.page)))
    return CachedPlan(len(tables), pages.page, tuple(map(tuple, found)), int(used.sum()))


def _share(
    tables: list[Any], whole: list[int], known: tuple[tuple[int, ...], int, int], found: list[list[SharedPages]], least: int,
    level: int = 0,
) -> None:
    """What some of the sequences share beyond [first, at), which all of them do and which is not among what was found."""
    members, first, at = known
    buckets: dict[int, list[int]] = {}
    for b in members:
        if whole[b] > at:
            buckets.setdefault(int(tables[b][at]), []).append(b)
    for page, some in buckets.items():
        if len(some) < 2 or page < 0:
            continue
        end = min(whole[b] for b in some)
        head = tables[some[0]][at:end]
        for b in some[1:]:
            differs = np.flatnonzero(tables[b][at : at + len(head)] != head)
            head = head[: differs[0]] if len(differs) else head
        end = at + len(head)
        if end - first < least:
            _share(tables, whole, (tuple(some), first, end), found, least, level)
            continue
        if len(found) == level:
            found.append([])
        found[level].append(SharedPages(tuple(some), first, end))
        _share(tables, whole, (tuple(some), end, end), found, least, level + 1)


def check_plan(plan: Any, pages: Pages, cu: Tensor, invariant: bool) -> None:
    """Raise on a plan that is none of this cache as it is now."""
    if not isinstance(plan, CachedPlan):
        raise ArgumentTypeError(f"plan: got {type(plan).__name__}, need what tw.plan_cached(cache) gives")
    if invariant:
        raise ArgumentError("plan: with invariant=True no row may depend on what others share; leave plan=None")
    if plan.batch != len(pages.starts) or plan.page != pages.page:
        raise ArgumentError(
            f"plan: made for {plan.batch} sequences in pages of {plan.page}, but the cache has {len(pages.starts)} in pages of "
            f"{pages.page}; call tw.plan_cached(cache) again"
        )
    if not readable(pages.lengths):
        return
    entries, starts = pages.entries.numpy(), pages.starts.numpy()
    for run in (run for level in plan.levels for run in level):
        own = [entries[starts[b] + run.first : starts[b] + run.past] for b in run.sequences]
        if not all(np.array_equal(own[0], other) for other in own[1:]):
            raise ArgumentError(
                f"plan: sequences {run.sequences[:4]} no longer share pages {run.first} to {run.past - 1}; "
                "call tw.plan_cached(cache) again"
            )
    before = (pages.lengths - cu.diff()).numpy() // pages.page
    for b, shared in enumerate(plan.shared):
        if shared > before[b] and cu[b + 1] > cu[b]:
            raise ArgumentError(
                f"plan: sequence {b} shares {shared} pages, but only {max(0, before[b])} lie before its queries; "
                "tw.plan_cached(cache, queries=n) leaves room for n"
            )


def attend_shared(plan: CachedPlan, pages: Pages, queries: tuple[Tensor, Tensor, int], attend: Attend, join: Join) -> Partial:
    """out (1, H, T, Dv) and lse (1, H, T) of packed queries (q, cu, rows): what each has of its own and what is shared, level by
    level, joined. `rows` are the queries of each sequence where all have as many, else 0. `attend(q, cu, pages, own)` is the
    attention of queries over pages, in parts, with the call's mask if they are their `own`; `join` merges all parts.

    No size depends on data, and nothing comes from the host after the first call: a graph may capture the next one.
    """
    q, cu, rows = queries
    parts = [PagedPart(*attend(q, cu, _own_pages(plan, pages, q.device), True))]
    for n in range(len(plan.levels)):
        at, place, cu_level, strangers = _rows_of(plan, n, (cu, rows), q.shape[0])
        prefix = _prefix_pages(plan, n, pages, strangers)
        parts.append(PagedPart(*attend(q if at is None else q[at], cu_level, prefix, False), place))
    return join(parts)


def join_parts(parts: list[PagedPart], sinks: Tensor | None) -> Partial:
    """All parts merged by torch. A query that sees nothing of its own, not even itself, is none: it sees nothing of what is
    shared."""
    outs, lses = [], []
    for out, lse, place in parts:
        if out.shape[0] > 1:
            out, lse = (x[None] for x in merge_many(out, lse))
        if place is not None:
            at, there = place.clamp(min=0), place >= 0
            out, lse = torch.where(there[:, None], out[:, :, at], 0.0), lse[:, :, at].masked_fill(~there, float("-inf"))
        outs.append(out)
        lses.append(lse)
    is_none = lses[0] == float("-inf")
    out, lse = merge_many(outs, [lse.masked_fill(is_none, float("-inf")) for lse in lses])
    return (out, lse) if sinks is None else join_sink(out, lse, sinks)


def _own_pages(plan: CachedPlan, pages: Pages, device: torch.device) -> Pages:
    """What sequences have beyond what they share. Of a table whose rows are equally long all but lengths is known."""
    most, shared = pages.most, plan.kept("shared", device, lambda: plan.shared)
    lengths, least = pages.lengths - shared * pages.page, min(plan.shared, default=0)
    if pages.indptr is None:
        starts = plan.kept(("own starts", most), device, lambda: [b * most + n for b, n in enumerate(plan.shared)])
        counts = plan.kept(("own counts", most), device, lambda: [most - n for n in plan.shared])
        most -= least
    else:
        starts, counts = pages.starts + shared, pages.counts - shared
    return pages._replace(starts=starts, counts=counts, lengths=lengths, most=most, within=False)


def _prefix_pages(plan: CachedPlan, n: int, pages: Pages, strangers: bool) -> Pages:
    """What each run of a level shares; for all who have no part in it nothing, as one sequence more."""
    runs = [*((run.sequences[0], run.first, run.past) for run in plan.levels[n]), *[(0, 0, 0)] * strangers]
    device, most, name = pages.starts.device, pages.most, (n, strangers)
    if pages.indptr is None:
        starts = plan.kept((*name, "starts", most), device, lambda: [b * most + first for b, first, _ in runs])
    else:
        leaders, firsts = plan.kept((*name, "leaders"), device, lambda: _columns([run[:2] for run in runs]))
        starts = pages.starts[leaders] + firsts
    counts = plan.kept((*name, "counts"), device, lambda: [past - first for _, first, past in runs])
    lengths = plan.kept((*name, "lengths"), device, lambda: [(past - first) * plan.page for _, first, past in runs])
    longest = max(past - first for _, first, past in runs)
    return pages._replace(starts=starts, counts=counts, lengths=lengths, most=longest, within=False)


def _columns(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return list(zip(*rows, strict=True))


def _rows_of(
    plan: CachedPlan, n: int, packing: tuple[Tensor, int], tokens: int
) -> tuple[Tensor | None, Tensor | None, Tensor, bool]:
    """The packed rows of the sequences of each run of a level, one run after the other, and the place of each token among them
    (both None where that is the order they come in); where each run's begin; and whether the rows of all other sequences follow,
    as one more sequence, which sees nothing."""
    (cu, rows), level = packing, plan.levels[n]
    members = [b for run in level for b in run.sequences]
    if rows:
        counts = accumulate((len(run.sequences) * rows for run in level), initial=0)
        cu_level = plan.kept((n, "cu", rows), cu.device, lambda: list(counts))
        if members == list(range(plan.batch)):
            return None, None, cu_level, False
        at = plan.kept((n, "rows", rows), cu.device, lambda: [b * rows + i for b in members for i in range(rows)])
        nth = {b: i for i, b in enumerate(members)}

        def places() -> list[int]:
            return [nth[b] * rows + i if b in nth else -1 for b in range(plan.batch) for i in range(rows)]

        return at, plan.kept((n, "places", rows), cu.device, places), cu_level, False
    strangers = len(members) < plan.batch

    def run_of_each() -> list[int]:
        number = [len(level)] * plan.batch
        for run, sequences in enumerate(level):
            for b in sequences.sequences:
                number[b] = run
        return number

    number, count = plan.kept((n, "runs"), cu.device, run_of_each), cu.diff()
    counts_level = count.new_zeros(len(level) + strangers).index_add_(0, number, count)
    at = torch.argsort(torch.repeat_interleave(number, count, output_size=tokens), stable=True)
    place = torch.empty_like(at).scatter_(0, at, torch.arange(tokens, device=at.device)).int()
    return at, place, torch.cat([cu.new_zeros(1), counts_level.cumsum(0)]).int(), strangers
