"""`explain` of a call over a cache: the launches it makes, the pages each reads, and how long they should take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

from torch import Tensor

from tilewise import dispatch
from tilewise.api.cache import KVCache
from tilewise.api.cached import CachedOptions, attention_cached
from tilewise.api.cached_call import CachedCall, attended, gathered_problem, parse_cached, problem_of
from tilewise.api.cached_checks import first_of
from tilewise.api.keywords import check_keywords
from tilewise.api.options import ParsedOptions
from tilewise.backends.base import PagedLaunch
from tilewise.backends.pages import Pages
from tilewise.backends.plans import Choice
from tilewise.diagnostics.explanation import Explanation, Tiles
from tilewise.diagnostics.measured import Measured, measure_run
from tilewise.diagnostics.plan import countable, machine, servers, tiles_of
from tilewise.display import Cell, Group, Shown, Table, format_bytes, format_seconds
from tilewise.errors import ArgumentError
from tilewise.hardware import DeviceSpec
from tilewise.masks import TileMap, causal
from tilewise.model import Plan, TilePlan
from tilewise.model import plan as model_plan
from tilewise.model.decide import planned
from tilewise.model.grid import even
from tilewise.problem import Problem

_OPTIONS: dict[str, Any] = {"mask": causal(), "scale": None, "bias": None, "softcap": 0.0, "sinks": None, "precision": "default"}
"""Those of `attention_cached` that the problem knows, with their defaults."""


class Asked(TypedDict):
    """What `explain` was asked beside the call."""

    device: str | DeviceSpec | None
    backend: str
    measure: bool


@dataclass(frozen=True)
class CachedLaunch:
    """One launch of a call over a cache."""

    sequences: int
    queries: int
    keys: int
    """Tokens that the sequences hold; what they share counts once."""
    pages: int
    """Pages that are read."""
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        figures = {"tile": self.plan.tile.to_dict(), "seconds": self.plan.seconds if self.plan.timed else None}
        counts = {name: getattr(self, name) for name in ("sequences", "queries", "keys", "pages")}
        return {**counts, "pass": self.plan.tile.pass_, "bytes": self.plan.dram.total, **figures}


@dataclass(frozen=True)
class CachedExplanation(Explanation):
    """The answer of `explain` for a cache. Where a call makes several launches, `plan` is that of the longest."""

    page: int = 0
    """Tokens of a page."""
    listed: int = 0
    """Pages that the sequences have, each as often as it is listed."""
    launches: tuple[CachedLaunch, ...] = ()

    @property
    def pages_read(self) -> int:
        return sum(launch.pages for launch in self.launches)

    @property
    def seconds(self) -> float:
        """The predicted time of all launches, one after the other."""
        return sum(launch.plan.seconds for launch in self.launches)

    def to_dict(self) -> dict[str, Any]:
        launches = [launch.to_dict() for launch in self.launches]
        pages = {"page": self.page, "listed": self.listed, "read": self.pages_read}
        return {**super().to_dict(), "pages": pages, "launches": launches, "seconds": self.seconds if self.timed else None}

    def content(self) -> Shown:
        shown = super().content()
        return Group(shown, self._launches()) if len(self.launches) > 1 else shown

    def _headline(self) -> list[tuple[str, Cell]]:
        rows = super()._headline()
        read = f"{self.pages_read:,} of {self.listed:,} read, {self.page} tokens each"
        splits = sorted({launch.plan.tile.splits for launch in self.launches})
        parts = f"; keys in {' and '.join(map(str, splits))} split{'s' * (splits != [1])}" if splits and self.server else ""
        rows.insert(3, ("pages", f"{read}{parts}"))
        if self.timed and len(self.launches) > 1:
            rows.append(("in all", [(format_seconds(self.seconds), "bold green"), f"  {len(self.launches)} launches"]))
        return rows

    def _launches(self) -> Table:
        rows: list[list[Cell]] = []
        for one in self.launches:
            tile = one.plan.tile
            counts = [f"{n:,}" for n in (one.sequences, one.queries, one.keys, one.pages)]
            figures = [format_bytes(one.plan.dram.total), format_seconds(one.plan.seconds)] if self.timed else ["–", "–"]
            rows.append([tile.pass_, *counts, (f"{tile}", "cyan"), str(tile.splits), *figures])
        columns = ("pass", "sequences", "queries", "keys", "pages", "tile", "splits", "HBM", "predicted")
        return Table("launches", columns, rows)


def explain_cached(q: Tensor, cache: KVCache, options: dict[str, Any], asked: Asked) -> CachedExplanation:
    """Explain `attention_cached(q, cache, …)`. The call is parsed as it is when it runs; its launches are noted, not made."""
    check_keywords("attention_cached", options, (*CachedOptions.__annotations__, "return_lse"))
    parsed = cast(ParsedOptions, {name: options.get(name, default) for name, default in _OPTIONS.items()})
    dispatch.check_name(asked["backend"], "auto")
    plan, wanted = options.get("plan"), (options.get("splits"), options.get("plan"), options.get("invariant", False))
    whole = parse_cached(q, cache, options.get("cu_seqlens_q"), parsed, *wanted)
    spec, live = machine(str(q.device) if asked["device"] is None else asked["device"])
    noted: list[CachedLaunch] = []
    answers: list[tuple[tuple[Choice, ...], bool]] = []

    def note(call: CachedCall) -> tuple[Tensor, Tensor]:
        choices, launches = _launches_of(call, spec, live, asked)
        answers.append((choices, not launches[0].problem.page))
        noted.extend(_noted(launch, spec, choices) for launch in launches)
        tokens, heads, _ = call.queries.q.shape
        return q.new_zeros((1, heads, tokens, call.pages.v.shape[3])), q.new_zeros((1, heads, tokens))

    attended(whole, plan, note)
    longest = max(noted, key=lambda one: one.plan.seconds)
    choices, gathers = answers[0]
    server = next((choice.name for choice in choices if choice.chosen), None)
    measured: Measured | None = None
    if asked["measure"]:
        if not live or server is None:
            raise ArgumentError(f"measure: {spec.name} is not this machine, or no backend serves the call here; leave it out")
        given: Any = {name: value for name, value in options.items() if name not in ("new", "rotary", "out")}
        given["backend"] = asked["backend"]
        measured = measure_run(longest.plan, lambda: attention_cached(q, cache, **given))
    pages = whole.pages
    return CachedExplanation(
        problem=longest.plan.problem,
        spec=spec,
        live=live,
        server=server,
        asked=asked["backend"],
        choices=choices,
        plan=longest.plan,
        tiles=_tiles([(one.plan.problem, one.plan.tile) for one in noted], longest.plan.tile),
        measured=measured,
        notes=_notes(pages, options, live, gathers),
        page=pages.page,
        listed=int((-(-pages.seen // pages.page)).sum()),
        launches=tuple(noted),
    )


def _launches_of(
    call: CachedCall, spec: DeviceSpec, live: bool, asked: Asked
) -> tuple[tuple[Choice, ...], list[PagedLaunch]]:
    """Every backend's answer, and the launches of the one that serves the call: over pages, or, where nobody who may serve it
    reads them, over what was gathered."""
    problem, inputs = problem_of(call)
    problem = replace(problem, device="cuda" if spec.is_gpu else "cpu")
    name = asked["backend"]
    reader = dispatch.pages_backend(problem, name) if live else None
    serving = servers(problem, spec, live, name)
    if live and reader is None:
        problem, inputs = gathered_problem(call)
        serving = servers(problem, spec, live, name, inputs)
    elif reader is not None and serving.name("forward") != reader.name:  # it takes pages that it would rather not have
        serving = servers(problem, spec, live, reader.name)
    launches = [PagedLaunch(problem, inputs, call.pages, {})]
    if reader is not None:
        launches = reader.paged_launches(problem, inputs, call.pages, spec)
    tiles = {pass_: tile for pass_, tile in tiles_of(problem, spec, serving).items() if not pass_.startswith("backward")}
    return serving.forward, [launch._replace(tiles=launch.tiles or tiles) for launch in launches]


def _noted(launch: PagedLaunch, spec: DeviceSpec, choices: tuple[Choice, ...]) -> CachedLaunch:
    """A launch with its figures, by the tokens that its sequences really have."""
    problem, inputs, pages, tiles = launch
    assert inputs.cu_q is not None
    rows, seen = inputs.cu_q.diff().cpu().numpy(), pages.seen.cpu().numpy()
    first = first_of(problem.program.terms(), seen, rows)
    read = int(((-(-seen // pages.page) - first // pages.page) * (rows > 0)).sum())
    keys = int(seen.sum())
    counted = countable(replace(problem, seqlen_k=keys))
    server = next((choice.name for choice in choices if choice.chosen), None)
    tile: TilePlan | None = tiles.get("decode", tiles.get("forward"))
    beside = {"backend": server, "passes": tuple(tiles.values())}
    plan = planned(counted, spec, tile, **beside) if tile else replace(model_plan(counted, spec), backend=server)
    return CachedLaunch(problem.batch, problem.seqlen_q, keys, read, plan)


def _tiles(parts: list[tuple[Problem, TilePlan]], shown: TilePlan) -> Tiles:
    """Tiles by class over all launches."""
    counts = []
    for problem, tile in parts:
        same = even(problem)
        counts.append(TileMap(same.program, same.shape, tile.block_q, tile.block_k).counts())
    skipped, masked, full = (sum(side) for side in zip(*counts, strict=True))
    return Tiles(shown.block_q, shown.block_k, full, masked, skipped)


def _notes(pages: Pages, options: dict[str, Any], live: bool, gathers: bool) -> tuple[str, ...]:
    notes = []
    if gathers:
        notes.append("nobody who may serve the call reads pages: their tokens are gathered into packed rows first")
    if not live:
        notes.append("the device is not this machine: what serves there is what the backends say of it, not tried")
    notes.append("bytes and times take the sequences of a launch as equally long")
    if pages.latent:
        notes.append("values are columns of the keys: the bytes of V are counted, and come with those of K")
    if options.get("new") is not None:
        notes.append("new tokens are written first; their bytes and time are not counted")
    return tuple(notes)
