"""`explain` of a call over a cache: the tiles, splits and pages that it shows are those of the launches that run."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.cache.caches import build
from tests.cache.test_plan_cached import LENGTHS, NESTED, shared
from tilewise import hardware
from tilewise.backends.cpu.launch import CpuLaunch
from tilewise.backends.cpu.spec import HOT, argument_names
from tilewise.diagnostics import measured
from tilewise.diagnostics.cached import CachedExplanation
from tilewise.errors import ArgumentError, ArgumentTypeError
from tilewise.hardware.ceilings import Ceilings

Launched = list[tuple[str, int, int, int]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Of each launch that runs: kernel, block sizes and splits, from the arguments of its kernel."""
    found: Launched = []
    run = CpuLaunch.run

    def watch(self: Any, *given: Any, **named: Any) -> None:
        names = argument_names(self.kernel)[len(HOT) :]
        arguments = dict(zip(names, memoryview(self.template).cast("q"), strict=True))
        sizes = (arguments[name] for name in ("BM", "BN", "splits"))
        found.append((self.kernel.kind, *sizes))  # type: ignore[arg-type]
        run(self, *given, **named)

    monkeypatch.setattr(CpuLaunch, "run", watch)
    return found


def shown_launches(shown: tw.Explanation) -> Launched:
    assert isinstance(shown, CachedExplanation)
    tiles = [launch.plan.tile for launch in shown.launches]
    return [(tile.pass_, tile.block_q, tile.block_k, tile.splits) for tile in tiles]


def test_what_is_shown_is_what_runs(launched: Launched) -> None:
    """Random batches: decoding, prompts, mixtures; windows, splits, invariant rows; one thread and two."""
    rng, threads = random.Random(22), torch.get_num_threads()
    try:
        for number in range(24):
            torch.set_num_threads(1 + number % 2)
            batch = rng.choice((1, 3))
            rows = [rng.choice((1, 1, 5, 40)) if number % 3 else 1 for _ in range(batch)]
            lengths = [rng.randrange(n, 3000) for n in rows]
            built = build(rows, lengths, page=rng.choice((5, 16)), heads=rng.choice(((4, 4), (4, 2))), seed=number)
            options = rng.choice(({}, {"mask": tw.causal() & tw.window(50)}, {"splits": 3}, {"invariant": True}, {"mask": None}))
            options["cu_seqlens_q"] = built.cu
            shown = tw.explain(built.q, built.cache, **options)
            launched.clear()
            tw.attention_cached(built.q, built.cache, **options)
            assert launched == shown_launches(shown), (rows, lengths, options)
            assert shown.chosen == "cpu" and shown.plan.problem.page
            assert json.loads(json.dumps(shown.to_dict()))["pages"]["read"] == shown.pages_read
    finally:
        torch.set_num_threads(threads)


def test_pages_that_are_read() -> None:
    """Those of the keys that queries see, each once for all who share it."""
    built = build([1, 5, 0], [100, 33, 50], page=16)
    plain = tw.explain(built.q, built.cache, cu_seqlens_q=built.cu)
    assert (plain.pages_read, plain.listed) == (7 + 3, 7 + 3 + 4)
    window = tw.explain(built.q, built.cache, cu_seqlens_q=built.cu, mask=tw.causal() & tw.window(5))
    assert window.pages_read == 2 + 2  # keys 95 to 99, keys 24 to 32
    assert "pages      4 of 14 read, 16 tokens each" in str(window) and "launches" in str(window)
    nested = shared(NESTED, LENGTHS, [1] * 5)
    plan = tw.plan_cached(nested.cache, least=8)
    whole = tw.explain(nested.q, nested.cache, cu_seqlens_q=nested.cu, plan=plan)
    assert whole.pages_read == plan.pages_read == 13 and whole.listed == plan.pages
    assert len(whole.launches) == 1 + len(plan.levels)
    assert whole.seconds == pytest.approx(sum(launch.plan.seconds for launch in whole.launches))


def test_shared_launches_are_those_that_run(launched: Launched) -> None:
    nested = shared(NESTED, LENGTHS, [1] * 5)
    plan = tw.plan_cached(nested.cache, least=8)
    shown = tw.explain(nested.q, nested.cache, cu_seqlens_q=nested.cu, plan=plan)
    tw.attention_cached(nested.q, nested.cache, cu_seqlens_q=nested.cu, plan=plan)
    assert launched == shown_launches(shown)


def test_bytes_are_those_of_the_tokens_there_are() -> None:
    """Of what sequences hold, not of what their tables have room for; int8 takes half of bf16."""
    sizes: dict[str, Any] = {"heads": (4, 2), "dims": (32, 32), "dtype": torch.bfloat16}
    narrow, wide = (build([1, 1], [64, 192], stored=stored, **sizes) for stored in (torch.int8, None))
    read = [tw.explain(x.q.unflatten(0, (2, 1)), x.cache).plan.compulsory.reads["K"] for x in (wide, narrow)]
    assert read == [2 * 256 * 2 * 32, 256 * 2 * 32]


def test_other_machines_and_backends() -> None:
    built = build([1], [300], heads=(8, 2), dtype=torch.bfloat16)
    q = built.q[:, None]
    there = tw.explain(q, built.cache, device="h200")
    assert there.there == "triton" and there.plan.tile.pass_ == "decode" and "not this machine" in str(there)
    same_bits = tw.explain(q, built.cache, device="h200", invariant=True)
    assert same_bits.there == "triton" and any("invariant" in reason for reason in same_bits.plan.tile.reasons)
    gathered = tw.explain(q, built.cache, backend="tiled")
    assert gathered.chosen == "tiled" and any("gathered" in note for note in gathered.notes)
    assert "seconds" in gathered.to_dict() and gathered.to_dict()["seconds"] is None
    with pytest.raises(ArgumentError, match="not this machine"):
        tw.explain(q, built.cache, device="h200", measure=True)


def test_nothing_is_written_and_all_is_checked() -> None:
    built = build([1, 1], [20, 30])
    q, new = built.q[:, None], torch.full((2, 1, 2, 32), 7.0)
    before = [x.clone() for x in built.pages]
    shown = tw.explain(q, built.cache, new=(new, new))
    assert any("new tokens" in note for note in shown.notes)
    for x, y in zip(before, built.pages, strict=True):
        assert torch.equal(x.nan_to_num(-9.0), y.nan_to_num(-9.0))
    with pytest.raises(ArgumentError, match="a cache takes neither v, tile nor pass_"):
        tw.explain(q, built.cache, q)
    with pytest.raises(ArgumentTypeError, match="wind: attention_cached has no such"):
        tw.explain(q, built.cache, wind=3)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match="with invariant=True keys are split"):
        tw.explain(q, built.cache, invariant=True, splits=2)
    none = tw.explain(q[:, :0], built.cache)
    assert none.pages_read == 0


def test_measured_calls_are_those_explained(monkeypatch: pytest.MonkeyPatch, launched: Launched) -> None:
    known = Ceilings("here", "2026-01-01", "a test", {"float32": 1e9}, copy=1e9, read=1e9, exp=1e9)
    monkeypatch.setattr(hardware, "measure", lambda device: known, raising=False)
    monkeypatch.setattr(measured, "ROUNDS", 1)
    built = build([1, 1], [200, 30])
    shown = tw.explain(built.q[:, None], built.cache, measure=True)
    assert shown.measured is not None and shown.measured.seconds > 0
    assert set(launched) == set(shown_launches(shown))
