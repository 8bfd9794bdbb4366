"""The Hopper kernels on a Hopper GPU: lengths around the edges of tiles, and many launches that give the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.numerics import checks
from tilewise import dispatch
from tilewise.backends import plans
from tilewise.backends.base import BackwardInputs, Grads, Inputs, Needs
from tilewise.hardware import probe_gpu
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.engine import bind_run
from tilewise.lab.bench.judge import Expected
from tilewise.lab.bench.peers import contender
from tilewise.numerics import bounds, statistics

if dispatch.usable("hopper", "cuda").ok:
    from tilewise.backends.hopper import launch as forward
    from tilewise.backends.hopper.backward import launch as backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not dispatch.usable("hopper", "cuda").ok, reason="hopper is not usable here"),
]
BACKEND, DEVICE = "hopper", "cuda"
NAN, INF = float("nan"), float("inf")
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
    *(grouped(head_dim=d, bias=(2, 8, 257, 1000), **UNEQUAL) for d in DIMS),
    *(shape(head_dim=d, bias=(1, 3, 300, 300)) for d in DIMS),
    *(shape(head_dim=d, bias=(2, 1, 1, 301), kv_seqlen=301, dtype="float16") for d in (64, 128)),
    shape(bias=(1, 3, 300, 300), sinks=True, softcap=20.0, dropout_p=0.1, data="padding"),
    shape(dropout_p=0.1, alibi=True, sinks=True, softcap=20.0, mask="causal"),
    *(grouped(head_dim=d, dropout_p=0.3, **UNEQUAL) for d in (16, 32, 40, 48, 56)),
    *(grouped(head_dim=d, head_dim_v=dv, dropout_p=0.3, mask=WINDOW) for d, dv in ((64, 32), (16, 64), (24, 40))),
    *(shape(head_dim=d, softcap=20.0, mask=WINDOW, **UNEQUAL) for d in (32, 48, 64)),
    *(grouped(head_dim=64, scale=-0.3, mask=mask, **UNEQUAL) for mask in ("full", "causal", WINDOW)),
    *(grouped(head_dim=64, lengths=PACKED, mask=WINDOW, **more) for more in ({"softcap": 20.0}, {"scale": -0.3})),
    *(grouped(head_dim=d, bias=(1, 8, 257, 1000), dropout_p=0.2, **UNEQUAL) for d in (32, 40, 64)),
    *(grouped(head_dim=64, bias=(6, 8, 1000, 1000), lengths=PACKED, mask=mask) for mask in FULL_OR_CAUSAL),
    shape(head_dim=64, bias=(1, 3, 300, 300), sinks=True, softcap=20.0, dropout_p=0.1, data="padding"),
    shape(head_dim=64, dropout_p=0.1, alibi=True, sinks=True, softcap=20.0),
    *(shape(head_dim=64, dropout_p=0.2, batch=8, heads=40, seqlen=520, mask=mask) for mask in FULL_OR_CAUSAL),
    *(shape(head_dim=64, **more, deterministic=True) for more in ({"dropout_p": 0.2}, {"softcap": 20.0}, {"scale": -0.3})),
]


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


@pytest.mark.parametrize("case", FEATURES, ids=lambda case: f"{case.words()}{' deterministic' * case.deterministic}")
def test_features_are_right(case: Case) -> None:
    problem = replace(case.problem(), device="cuda")
    assert dispatch.judge(BACKEND, problem, None, backward=True).ok
    is_ours = dispatch.select(problem, backward=True).backend.name == BACKEND
    assert is_ours == (case.bias is None or case.head_dim < 256)
    test_right_at_the_edges_of_tiles(case)


@pytest.mark.parametrize("mask", FULL_OR_CAUSAL)
def test_each_pass_of_dropout_has_its_own_backend(mask: str) -> None:
    """At head dim 64 another backend serves the forward beside ALiBi; the mask of dropout is the same in both."""
    case = replace(shape(head_dim=64, dropout_p=0.3, alibi=True, mask=mask), device=DEVICE)
    serving = [dispatch.select(case.problem(), backward=backward).backend.name for backward in (False, True)]
    assert serving == ["triton", BACKEND]
    tensors = case.tensors()
    judgement = Expected(case, tensors).judge(bind_run(case, contender("tilewise"), tensors)())
    assert judgement.ok, judgement


@pytest.mark.parametrize("case", FEATURES, ids=lambda case: f"{case.words()}{' deterministic' * case.deterministic}")
@pytest.mark.parametrize("dbias", [True, False], ids=["all", "without the bias"])
def test_gradients_of_features_are_right(case: Case, dbias: bool) -> None:
    """All of them, those of sinks too, which benchmarks do not ask for."""
    if not (dbias or case.bias):
        pytest.skip("there is no bias")
    case = replace(case, device=DEVICE)
    problem, tensors = replace(case.problem(), needs_lse=True), case.tensors()
    inputs, dout = case.inputs(tensors), case.rank4(tensors.dout)
    backend = dispatch.get(BACKEND)
    out, lse = backend.forward(problem, inputs)
    dlse = torch.randn_like(lse)
    needs = Needs(dbias=bool(case.bias) and dbias, dsinks=case.sinks)
    poisoned()
    found = backend.backward(problem, inputs, BackwardInputs(out, lse, dout, dlse, needs))
    assert (found.dsinks is not None) == case.sinks and (found.dbias is not None) == needs.dbias
    there = [Inputs(*(None if x is None else x.cpu() for x in inputs)), dout.cpu(), dlse.cpu()]
    found = Grads(*(None if x is None else x.cpu() for x in found))
    assert checks.check_backward(replace(case, device="cpu").problem(), *there, found) == []


def near(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Sums of dQ in another order: three terms of fp32, tenfold the largest sum at most, then one step of 16 bits."""
    slack = torch.finfo(want.dtype).eps * want.abs() + 32 * torch.finfo(torch.float32).eps * want.abs().max()
    return bool(((found - want).abs() <= slack).all())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sides", [(2, 4, 300, 300), (1, 4, 300, 300), (1, 1, 300, 300)], ids=str)
@pytest.mark.parametrize("mask", [None, tw.causal(), tw.causal() & tw.key_padding([250, 40])], ids=str)
def test_a_bias_hides_whatever_there_is(mask: tw.Mask | None, sides: tuple[int, ...], head_dim: int) -> None:
    """Keys that mask and bias together hide from all queries, and queries from which they hide all keys."""
    shapes = ((2, 4, 300, head_dim), (2, 2, 300, head_dim), (2, 2, 300, head_dim), (2, 4, 300, head_dim))
    q, k, v, dout = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in shapes)
    bias = torch.randn(sides, device=DEVICE, dtype=torch.bfloat16)
    bias[..., 10:25] = bias[:, :, 40:45] = bias[:, :, 3, :4] = bias[:, :, 290:, 290] = -INF
    if mask is None:
        bias[:, :, 3] = bias[..., 290] = -INF

    def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        poisoned()
        out, lse = tw.attention(*leaves, bias=bias, mask=mask, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    assert tw.explain(q, k, v, bias=bias, mask=mask).chosen == BACKEND
    spoiled = [x.clone() for x in (q, k, v, dout)]
    for x in (spoiled[0], spoiled[3]):
        x[:, :, 40:45] = x[:, :, 3] = NAN
    for x, garbage in ((spoiled[1], NAN), (spoiled[2], INF)):
        x[:, :, 10:25] = x[:, :, 290] = garbage
    same = [torch.equal, torch.equal, near if head_dim == 64 else torch.equal, torch.equal, torch.equal]
    for found, want, alike in zip(results(*spoiled), results(q, k, v, dout), same, strict=True):
        assert alike(found, want) and not want.isnan().any()


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_a_hidden_key_that_only_dq_tells_of(head_dim: int) -> None:
    """Its scores are -inf without the bias too: weights, dK and dV are 0, and dQ adds 0 · inf."""
    q, k, v, dout = (torch.randn(1, 2, 256, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    q[..., 0] = q[..., 0].abs() + 0.5
    bias = torch.randn(1, 2, 256, 256, device=DEVICE, dtype=torch.bfloat16)
    bias[..., 150] = -INF

    def gradients(k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(tw.attention(*leaves, bias=bias, backend=BACKEND), leaves, dout)

    spoiled = k.clone()
    spoiled[:, :, 150, 0] = -INF
    (dq, *others), (want, *wanted) = gradients(spoiled), gradients(k)
    assert near(dq, want) and all(torch.equal(x, y) for x, y in zip(others, wanted, strict=True))


TWO_PASSES = {"backward_dkdv": (64, 64), "backward_dq": (128, 64)}
ASKED: list[tuple[int, dict[str, tuple[int, int]]]] = [
    *((64, {"forward": pair}) for pair in ((128, 128), (128, 64), (192, 128), (192, 64))),
    *((128, {"forward": pair}) for pair in ((128, 128), (128, 64), (192, 64))),
    (64, {"backward": (128, 128)}),
    (64, {"backward": (64, 128)}),
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


@pytest.mark.parametrize("mask", [None, tw.causal(), tw.causal() & tw.window(100)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("d", DIMS)
def test_statistics(d: int, mask: Any) -> None:
    q, k, v = (torch.randn(2, 3, n, d, dtype=torch.bfloat16, device=DEVICE) for n in (500, 700, 700))
    plain = tw.attention(q, k, v, mask=mask, backend=BACKEND)
    out, stats = tw.attention(q, k, v, mask=mask, stats=("max_logit", "entropy"), backend=BACKEND)  # type: ignore[call-overload]
    assert torch.equal(out, plain)
    sizes = {"batch": 2, "heads": 3, "seqlen": 500, "kv_seqlen": 700, "head_dim": d}
    problem = tw.Problem.of(**sizes, dtype="bfloat16", mask=mask, device=DEVICE)
    exact, slack = (of(problem, Inputs(q, k, v)) for of in (statistics.exact, statistics.bounds))
    for name in ("max_logit", "entropy"):
        assert bounds.ratios(getattr(stats, name), getattr(exact, name), getattr(slack, name)).max() <= 1, name
