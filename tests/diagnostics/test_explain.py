"""explain: the facts for every mask and every backend, not their wording."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.conformance.cases import BY_NAME, MASKS, Case, build
from tilewise import dispatch, hardware
from tilewise.backends import plans
from tilewise.diagnostics import measured
from tilewise.diagnostics.explain import explain
from tilewise.errors import ArgumentError, ArgumentTypeError
from tilewise.hardware.ceilings import Ceilings
from tilewise.masks import MaskShape, allowed
from tilewise.problem import Problem

FACTS = Path(__file__).with_name("facts.json")
RENEW = "TILEWISE_RENEW_FACTS"
"""Set to write the snapshot anew; what changed must then be looked at."""
TILE = (32, 16)
CALL = Case("explained", heads=4, kv_heads=2, seqlen=130, kv_seqlen=150, head_dim=32)


def facts(found: Any) -> dict[str, Any]:
    """What is snapshot: counts and bytes, which follow from mask, shape and tile alone."""
    told = found.to_dict()
    tensors = told["traffic"]["tile"]["tensors"]
    return {
        "mask": told["problem"]["mask"],
        "tiles": told["tiles"],
        "useful": told["flops"]["useful"],
        "executed": told["flops"]["executed"],
        "bytes": {name: [side["read"], side["write"]] for name, side in tensors.items()},
        "compulsory": told["traffic"]["compulsory"]["total"],
        "bound": told["roofline"]["bound"],
    }


def explained(mask: str | None) -> Any:
    case = CALL if mask is None else replace(CALL, name=mask, mask=MASKS[mask])
    built = build(case)
    return built, explain(built.q, built.k, built.v, device="h200", tile=TILE, **built.options)


def test_facts_of_every_mask() -> None:
    found = {mask or "none": facts(explained(mask)[1]) for mask in (None, *MASKS)}
    if os.environ.get(RENEW):
        FACTS.write_text(json.dumps(found, indent=1) + "\n")
    known = json.loads(FACTS.read_text())
    assert found.keys() == known.keys()
    for mask, told in found.items():
        assert told == known[mask], mask


@pytest.mark.parametrize("mask", MASKS)
def test_tiles_and_pairs_are_those_of_the_mask(mask: str) -> None:
    """Held to the mask itself, element by element, so that a wrong snapshot cannot pass."""
    built, found = explained(mask)
    problem, (rows, cols) = built.problem, TILE
    shape = MaskShape(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    everything = allowed(problem.program, shape, (0, 130), (0, 150), torch.arange)
    seen = np.broadcast_to(np.ones(1, bool) if everything is None else everything.numpy(), shape)
    held = [
        seen[b, h, i : i + rows, j : j + cols]
        for b in range(problem.batch)
        for h in range(problem.heads)
        for i in range(0, 130, rows)
        for j in range(0, 150, cols)
    ]
    tiles = found.tiles
    assert tiles.total == len(held)
    assert tiles.skipped <= sum(not tile.any() for tile in held)  # sound always,
    assert tiles.full <= sum(bool(tile.all()) for tile in held)
    joined = ("three-terms", "causal-documents", "not-documents", "not-window", "prefix-lm", "prefix-tensor")
    if mask not in (*joined, "selected-all", "not-selected"):
        assert tiles.skipped == sum(not tile.any() for tile in held)  # exact for single masks and bands
        assert tiles.full == sum(bool(tile.all()) for tile in held)
    assert found.plan.work.useful == int(seen.sum()) * 2 * (32 + 32)


@pytest.mark.parametrize("backend", ["auto", *dispatch.REGISTRY])
@pytest.mark.parametrize("name", ["plain", "mask-causal", "bias-xxxx", "everything", "varlen", "dtype-float64"])
def test_every_backend_answers(backend: str, name: str) -> None:
    built = build(BY_NAME[name])
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), built.packed or (), strict=False))
    found = explain(built.q, built.k, built.v, backend=backend, **built.options, **packed)
    told = found.to_dict()
    json.dumps(told, allow_nan=False)
    assert list(told["backends"]) == list(dispatch.REGISTRY)
    verdicts = {n: dispatch.judge(n, built.problem, built.inputs) for n in dispatch.REGISTRY}
    for n, verdict in verdicts.items():
        assert told["backends"][n]["serves"] == verdict.ok
        assert told["backends"][n]["chosen"] == (n == told["backend"])
        assert told["backends"][n]["reasons"] or n == told["backend"], "one that is not taken must say why"
    if backend == "auto":
        assert told["backend"] == dispatch.select(built.problem, built.inputs).backend.name
    else:
        assert told["backend"] == (backend if verdicts[backend].ok else None)
    assert told["binding"] in {*told["limits"], "latency"}
    plain = told["tile"]["kernel"] == "torch"  # its time is not modelled, and nothing of it is on the chip by our doing
    assert plain == (told["backend"] == "tiled") == (told["seconds"] is None) == (not told["on_chip"]["bytes"])
    assert (told["passes"] == {}) == (told["backend"] in (None, "aten", "reference"))


def test_packed_batches_are_counted_by_their_lengths() -> None:
    q = torch.randn(96, 2, 16)
    found = explain(q, q, q, mask=tw.causal(), cu_seqlens_q=torch.tensor([0, 32, 96]), device="h200", tile=(32, 32))
    assert (found.tiles.visited, found.tiles.masked, found.tiles.skipped) == (2 * (1 + 3), 2 * (1 + 2), 2 * 1)


def test_a_problem_needs_neither_tensors_nor_its_device() -> None:
    problem = Problem.of(heads=8, head_dim=128, seqlen=4096, mask=tw.causal())
    found = explain(problem, device="h200")
    assert not found.live and found.chosen is None
    assert found.spec.key == "h200" and found.plan.dram.total >= found.plan.compulsory.total
    here = explain(problem)
    assert here.live and here.chosen is not None


@pytest.mark.parametrize("backend", ["tiled", "triton", "hopper"])
def test_figures_of_another_backend_are_not_shown(backend: str) -> None:
    """Plain torch has a tile and no model of its time; what cannot serve the call has neither."""
    problem = Problem.of(heads=2, head_dim=64, seqlen=512, dtype="float32", mask=tw.causal(), device="cpu")
    found, own = explain(problem, device="cpu", backend=backend), explain(problem, device="cpu", backend="cpu")
    assert own.figures_of == "cpu" and own.timed and not found.timed
    for shown in (str(found).lower(), found._repr_html_().lower()):
        for figure in ("predicted", "register tile", "bytes by tensor", "time by resource"):
            assert figure not in shown and figure in str(own).lower()
        assert "figures" in shown and ("none: nobody serves" in shown) == (backend != "tiled")
        assert ("512×512" in shown) == (backend == "tiled")


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_a_backend_without_tiles_of_ours_says_so(backend: str) -> None:
    problem = Problem.of(heads=2, head_dim=64, seqlen=512, dtype="float32", mask=tw.causal(align="top_left"))
    for found in (explain(problem, device="cpu", backend=backend), tw.plan(problem, "cpu", backend=backend)):
        told = found.to_dict()
        assert (told["backend"], told["figures_of"], told["passes"]) == (backend, "model", {})
        assert f"the model's: {backend} has no tile of ours" in str(found) and "kernels" not in str(found)


@pytest.mark.parametrize(
    ("device", "options", "server", "figures"),
    [
        ("h200", {"dtype": "bfloat16"}, "hopper", "hopper"),
        ("h200", {"dtype": "float32"}, "triton", "triton"),
        ("h200", {"dtype": "float64"}, "tiled", "tiled"),
        ("a100", {"dtype": "bfloat16"}, "triton", "triton"),
        ("v100", {"dtype": "float16"}, "tiled", "tiled"),
        ("mi300x", {"dtype": "bfloat16"}, "triton", "triton"),
        ("xeon-8480", {"dtype": "float32"}, "cpu", "cpu"),
        ("h200", {"dtype": "bfloat16", "alibi": True}, "hopper", "hopper"),
        ("h200", {"dtype": "bfloat16", "alibi": True, "bias": (1, 1, 512, 512)}, "triton", "triton"),
    ],
)
def test_another_machine_is_judged_by_its_kind(device: str, options: dict[str, Any], server: str, figures: str) -> None:
    found = explain(Problem.of(heads=2, head_dim=64, seqlen=512, mask=tw.causal(), **options), device=device)
    assert (found.chosen, found.there, found.server, found.figures_of) == (None, server, server, figures)
    told = found.to_dict()
    assert told["backend"] is None and told["backend_there"] == server
    assert "none here" not in str(found) and f"{server} would serve it there" in str(found)
    spec = hardware.device(device)
    there = replace(found.problem, device="cuda" if spec.is_gpu else "cpu")
    assert told["passes"] == {pass_: tile.to_dict() for pass_, tile in plans.tiles(server, there, spec).items()}
    assert f"{found.plan.tile}" in str(found) and all(str(tile) in str(found) for tile in found.plan.passes)
    for name, verdict in told["backends"].items():
        assert verdict["reasons"] or name == server
        assert not any("no CUDA device" in reason or "no GPU" in reason for reason in verdict["reasons"])


def test_asking_there_by_name() -> None:
    problem = Problem.of(heads=2, head_dim=64, seqlen=512, mask=tw.causal())
    assert explain(problem, device="h200", backend="triton").there == "triton"
    assert explain(problem, device="a100", backend="hopper").there is None


def test_backends_of_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(dispatch, "_present_devices", set())
    for device in ("cuda", "cuda:0"):
        found = tw.backends(device)
        assert list(found) == list(dispatch.REGISTRY) and not any(verdict.ok for verdict in found.values())
        assert found["tiled"].reasons == ("torch finds no GPU here",)
    assert tw.backends("cpu")["tiled"].ok
    with pytest.raises(ArgumentError, match=r"device: got 'h200'.*'cuda'"):
        tw.backends("h200")


def test_it_speaks() -> None:
    found = explain(Problem.of(heads=2, head_dim=64, seqlen=512, mask=tw.causal()), device="a100")
    text, page = str(found), found._repr_html_()
    for word in ("A100", "LSE", found.binding, *dispatch.REGISTRY):
        assert word in text and word in page


def test_measuring_names_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Ceilings("here", "2026-01-01", "a test", {"float32": 1e9}, copy=1e9, read=1e9, exp=1e9)
    monkeypatch.setattr(hardware, "measure", lambda device: known, raising=False)
    q, k, v = (torch.randn(1, 1, 128, 16) for _ in range(3))
    found = explain(q, k, v, mask=tw.causal(), measure=True)
    taken = found.measured
    assert taken is not None and taken.seconds > 0
    assert taken.ideal == pytest.approx(found.plan.work.useful / 1e9, rel=0.5)
    assert taken.of_ceiling > 0
    assert set(taken.losses) >= {"launch", "exp unit", "traffic", "tail wave"}
    assert sum(taken.losses.values()) == pytest.approx(max(0.0, taken.seconds - taken.ideal))
    assert taken.loss in taken.losses
    assert "measured" in str(found)


@pytest.mark.parametrize(
    ("cause", "change"),
    [("launch", {"launch": 1.0}), ("exp unit", {"exp_rate": 1e3}), ("kernel", {})],
)
def test_a_planted_cause_is_the_named_loss(cause: str, change: dict[str, float]) -> None:
    found = explain(Problem.of(heads=8, head_dim=64, seqlen=1024, dtype="float32"), device="h200")
    spec = found.spec.with_figures("planted", exp_rate=change.get("exp_rate", 1e15))
    losses = measured.name_losses(found.plan, 1.5, 1e-3, change.get("launch", 0.0), spec)
    assert max(losses, key=lambda name: losses[name]) == cause
    assert sum(losses.values()) == pytest.approx(1.5 - 1e-3)


def test_wrong_arguments_are_refused() -> None:
    problem = Problem.of(heads=1, head_dim=16, seqlen=64)
    with pytest.raises(ArgumentError, match="Problem"):
        explain(problem, softcap=1.0)
    with pytest.raises(ArgumentTypeError, match="q, k and v"):
        explain(torch.zeros(1, 1, 4, 4))
    with pytest.raises(ArgumentError, match="measure"):
        explain(problem, device="h200", measure=True)
    with pytest.raises(ArgumentError, match="backend"):
        explain(problem, backend="nobody")
