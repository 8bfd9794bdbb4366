"""The Hopper kernels on a Hopper GPU: lengths around the edges of tiles, and many launches that give the same bits."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.numerics import checks
from tilewise import dispatch
from tilewise.backends import plans
from tilewise.backends.base import BackwardInputs, Grads, Inputs, Needs
from tilewise.backends.hopper.features import SWITCH
from tilewise.hardware import probe_gpu
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.engine import bind_run
from tilewise.lab.bench.judge import Expected
from tilewise.lab.bench.peers import contender

if dispatch.usable("hopper", "cuda").ok:
    from tilewise.backends.hopper import launch as forward
    from tilewise.backends.hopper.backward import launch as backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not dispatch.usable("hopper", "cuda").ok, reason="hopper is not usable here"),
]
BACKEND, DEVICE = "hopper", "cuda"
LAUNCHES = 1000
DIMS = (64, 128, 256)
WINDOW = "causal & window(100)"
WINDOWS = (WINDOW, "window(70, 20)")
FULL_OR_CAUSAL = ("full", "causal")
EDGES = ((1, 1), (64, 64), (65, 63), (128, 128), (129, 127), (192, 256), (1, 500), (500, 1), (257, 1000), (1000, 257))
shape = partial(Case, "", batch=2, heads=3, seqlen=300, head_dim=128, dtype="bfloat16", passes="training")
grouped = partial(shape, heads=8, kv_heads=2, mask="causal")
CASES = [
    *(shape(head_dim=d, seqlen=m, kv_seqlen=n, mask=mask) for d in DIMS for m, n in EDGES for mask in FULL_OR_CAUSAL),
    *(shape(head_dim=d, seqlen=m, kv_seqlen=n, mask=mask) for d in DIMS for m, n in EDGES[3:] for mask in WINDOWS),
    *(shape(head_dim=d, seqlen=m, kv_seqlen=n, batch=1, heads=2) for d in DIMS for m, n in ((2048, 2048), (4100, 4000))),
    *(shape(head_dim=d, batch=8, heads=40, seqlen=520, mask="causal") for d in DIMS),
    *(shape(head_dim=d, data="padding", mask=mask) for d in DIMS for mask in FULL_OR_CAUSAL),
    *(shape(head_dim=d, data="offsets", mask="full") for d in DIMS),
    *(shape(head_dim=d, dtype="float16", layout="bshd") for d in DIMS),
    *(grouped(head_dim=d, layout="bshd") for d in DIMS),
    *(grouped(head_dim=d, kv_heads=1, mask="full", kv_seqlen=700, layout="bshd") for d in DIMS),
    *(shape(mask=mask, seqlen=200, kv_seqlen=333) for mask in ("causal(top_left)", "prefix(150)", "causal(offset=40)", "~full")),
    *(shape(head_dim=d, mask="causal | prefix(150)", kv_seqlen=400) for d in (64, 128)),
    *(shape(head_dim=d, mask=mask, softcap=20.0) for d in DIMS for mask in FULL_OR_CAUSAL),
    *(shape(scale=scale) for scale in (-0.2, 0.0)),
    *(shape(head_dim=d, mask="causal") for d in (8, 80, 96, 160, 192)),
    *(shape(head_dim=d, head_dim_v=dv, mask="causal") for d in (*DIMS, 192) for dv in DIMS if d != dv),
    *(grouped(head_dim=d, lengths=(5, 33, 0, 200, 129, 1000), mask=mask) for d in DIMS for mask in ("full", "causal", WINDOW)),
    *(shape(head_dim=d, seqlen=m, kv_seqlen=8192, mask=mask) for d in (128, 256) for m in (140, 300) for mask in FULL_OR_CAUSAL),
    *(shape(head_dim=256, batch=1, heads=10, seqlen=1030, kv_seqlen=8192, dtype=dtype) for dtype in ("bfloat16", "float16")),
    *(shape(head_dim=d, seqlen=1000, mask=mask, deterministic=True) for d in DIMS for mask in ("full", "causal", WINDOW)),
]
PACKED = (5, 33, 0, 200, 129, 1000)
UNEQUAL = {"seqlen": 257, "kv_seqlen": 1000}
FEATURES = [
    *(grouped(head_dim=d, sinks=True, mask=WINDOW, **UNEQUAL) for d in DIMS),
    *(shape(head_dim=d, sinks=True, data="padding") for d in DIMS),
    *(grouped(head_dim=d, sinks=True, lengths=PACKED) for d in DIMS),
    shape(sinks=True, mask="causal", softcap=20.0, deterministic=True),
    *(grouped(head_dim=d, alibi=True, **UNEQUAL) for d in DIMS),
    *(shape(head_dim=d, alibi=True) for d in DIMS),
    *(grouped(head_dim=d, alibi=True, lengths=PACKED) for d in DIMS),
    *(shape(head_dim=d, alibi=True, mask=WINDOW, deterministic=True) for d in (64, 128)),
    shape(alibi=True, mask="causal", softcap=20.0),
    *(grouped(head_dim=d, dropout_p=0.1, **UNEQUAL) for d in DIMS),
    *(shape(head_dim=d, dropout_p=0.2, data="padding", dtype="float16") for d in DIMS),
    *(grouped(head_dim=d, dropout_p=0.6, lengths=PACKED) for d in DIMS),
    shape(dropout_p=0.1, alibi=True, sinks=True, softcap=20.0, mask="causal"),
]

switched_on = pytest.mark.skipif(os.environ.get(SWITCH) != "1", reason=f"served with {SWITCH}=1 only")


def poisoned() -> None:
    """Fresh memory holds NaN from here on."""
    block = torch.full((1 << 24,), float("nan"), device=DEVICE)
    del block


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.words()}{' deterministic' * case.deterministic}")
def test_right_at_the_edges_of_tiles(case: Case) -> None:
    case = replace(case, device=DEVICE)
    if not dispatch.judge(BACKEND, case.problem(), case.inputs(case.tensors()), backward=True).ok:
        case = replace(case, passes="forward")
    tensors = case.tensors()
    expected = Expected(case, tensors)
    for _ in range(3):  # as it comes, recorded, repeated
        poisoned()
        judgement = expected.judge(bind_run(case, contender(f"tilewise:{BACKEND}"), tensors)())
        assert judgement.ok, judgement


@switched_on
@pytest.mark.parametrize("case", FEATURES, ids=lambda case: f"{case.words()}{' deterministic' * case.deterministic}")
def test_features_are_right(case: Case) -> None:
    problem = replace(case.problem(), device="cuda")
    assert dispatch.judge(BACKEND, problem, None, backward=True).ok
    test_right_at_the_edges_of_tiles(case)


@switched_on
@pytest.mark.parametrize("case", FEATURES, ids=lambda case: f"{case.words()}{' deterministic' * case.deterministic}")
def test_gradients_of_features_are_right(case: Case) -> None:
    """All of them, those of sinks too, which benchmarks do not ask for."""
    case = replace(case, device=DEVICE)
    problem, tensors = replace(case.problem(), needs_lse=True), case.tensors()
    inputs, dout = case.inputs(tensors), case.rank4(tensors.dout)
    backend = dispatch.get(BACKEND)
    out, lse = backend.forward(problem, inputs)
    dlse = torch.randn_like(lse)
    found = backend.backward(problem, inputs, BackwardInputs(out, lse, dout, dlse, Needs(dsinks=case.sinks)))
    assert (found.dsinks is not None) == case.sinks
    there = [Inputs(*(None if x is None else x.cpu() for x in inputs)), dout.cpu(), dlse.cpu()]
    found = Grads(*(None if x is None else x.cpu() for x in found))
    assert checks.check_backward(replace(case, device="cpu").problem(), *there, found) == []


TWO_PASSES = {"backward_dkdv": (64, 64), "backward_dq": (128, 64)}
ASKED: list[tuple[int, dict[str, tuple[int, int]]]] = [
    *((64, {"forward": pair}) for pair in ((128, 128), (128, 64), (192, 128), (192, 64))),
    *((128, {"forward": pair}) for pair in ((128, 128), (128, 64), (192, 64))),
    (64, {"backward": (128, 128)}),
    (128, {"backward": (64, 128)}),
    *((d, TWO_PASSES) for d in DIMS),
    (64, {"backward_dkdv": (64, 128)}),
    (128, {"backward_dq": (128, 128)}),
]


@pytest.mark.parametrize("mask", FULL_OR_CAUSAL)
@pytest.mark.parametrize(("dim", "asked"), ASKED, ids=str)
def test_a_tile_that_is_asked_for_is_right_and_is_what_runs(
    dim: int, asked: dict[str, tuple[int, int]], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: dict[str, tuple[int, int]] = {}
    for module in (forward, backward):
        compiled = module.kernel_for

        def watch(name: str, dtype: str, arguments: Any, config: Any, compiled: Any = compiled) -> Any:
            ran[name] = (config.BLOCK_M, config.BLOCK_N)
            return compiled(name, dtype, arguments, config)

        monkeypatch.setattr(module, "kernel_for", watch)
    tile = tuple((pass_, *pair) for pass_, pair in sorted(asked.items()))
    case = replace(shape(head_dim=dim, seqlen=700, kv_seqlen=650, mask=mask, tile=tile), device=DEVICE)
    tensors = case.tensors()
    poisoned()
    judgement = Expected(case, tensors).judge(bind_run(case, contender(f"tilewise:{BACKEND}"), tensors)())
    assert judgement.ok, judgement
    spec = probe_gpu(0)
    assert spec is not None
    tiles = plans.tiles(BACKEND, case.problem(), spec)
    assert all(tiles[pass_].sizes == pair for pass_, pair in asked.items())
    around = ("backward_preprocess", "backward_postprocess")
    assert {tile.kernel: tile.sizes for name, tile in tiles.items() if name not in around} == {
        name: sizes for name, sizes in ran.items() if name not in ("preprocess_kernel", "postprocess_kernel")
    }


BUSY = [
    *(shape(head_dim=d, mask="causal", heads=20, seqlen=1000) for d in DIMS),
    shape(mask=WINDOW, heads=20, kv_heads=5, seqlen=777),
    shape(data="padding", seqlen=1000),
    shape(head_dim=256, batch=1, heads=30, seqlen=600, kv_seqlen=6144),
    *(shape(head_dim=d, mask=mask, heads=20, seqlen=1000, deterministic=True) for d in DIMS for mask in FULL_OR_CAUSAL),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", BUSY, ids=lambda case: f"{case.words()}{' deterministic' * case.deterministic}")
def test_many_launches_give_the_same_bits(case: Case) -> None:
    """The output, dK and dV always; dQ, which sums in any order, only where that is asked for."""
    case = replace(case, device=DEVICE)
    run = bind_run(case, contender(f"tilewise:{BACKEND}"), case.tensors())
    out, (dq, dk, dv) = run()
    differing = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    for _ in range(LAUNCHES):
        again, grads = run()
        pairs = ((again, out), (grads[1], dk), (grads[2], dv))
        differing[:3] += torch.stack([(x != y).any() for x, y in pairs])
        limit = 0.0 if case.deterministic else 0.01 * dq.abs().max()
        differing[3] += ((grads[0] - dq).abs() > limit).any()
    assert differing.tolist() == [0, 0, 0, 0]
