"""Statistics of a call: held to the float64 oracle by derived bounds, on every backend that has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings

import tilewise as tw
from tests.api.test_fuzz import calls
from tests.conformance.cases import CASES, Built, Case, build
from tilewise import dispatch
from tilewise.api.statistics import Stats
from tilewise.backends.base import Inputs
from tilewise.errors import ArgumentError, ArgumentTypeError, BackendError, DerivativeError
from tilewise.numerics import bounds, statistics

BACKENDS = ["cpu", "tiled", "reference"]
LONG = bool(os.environ.get("TILEWISE_FUZZ"))
ALL = ("max_logit", "entropy", "key_mass", tw.top(5))


def called(built: Built, backend: str, stats: Any = ALL, **more: Any) -> tuple[torch.Tensor, torch.Tensor, Stats]:
    out, lse, *rest = built.call(backend, stats=stats, **more)
    return out, lse, *rest  # type: ignore[return-value]


def outside(actual: torch.Tensor | None, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest error over its bound."""
    assert actual is not None and actual.shape == exact.shape
    ratio = bounds.ratios(actual, exact, bound)
    return ratio.max().item() if ratio.numel() else 0.0


def check(built: Built, backend: str) -> None:
    out, lse, stats = called(built, backend)
    plain_out, plain_lse = built.call(backend)
    same: dict[str, Any] = {"rtol": 0, "atol": 0} if built.problem.seqlen_q > 1 else {}  # decoding has a kernel of its own
    torch.testing.assert_close(out, plain_out, equal_nan=True, **same)
    torch.testing.assert_close(lse, plain_lse, equal_nan=True, **same)
    inputs = Inputs(*(None if x is None else x.detach() for x in built.inputs))  # type: ignore[arg-type]
    exact, bound = statistics.exact(built.problem, inputs), statistics.bounds(built.problem, inputs)
    if built.packed is not None:
        stats = Stats(*(x.unsqueeze(0) for x in stats[:3]), top=type(stats.top)(*(x.unsqueeze(0) for x in stats.top)))  # type: ignore[union-attr, misc, arg-type]
    assert outside(stats.max_logit, exact.max_logit, bound.max_logit) <= 1
    assert outside(stats.entropy, exact.entropy, bound.entropy) <= 1
    assert outside(stats.key_mass, exact.key_mass, bound.key_mass) <= 1
    assert stats.top is not None
    check_top(stats.top.weights, stats.top.indices, exact.weights, bound.weights)


def check_top(weights: torch.Tensor, indices: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """Falling weights of different keys, as large as the exact ones; -1 and 0 beyond them."""
    k = min(5, exact.shape[-1])
    missing = indices < 0
    assert (weights[missing] == 0).all() and (weights[..., 1:] <= weights[..., :-1]).all()
    for a in range(5):
        for b in range(a):
            assert ((indices[..., a] != indices[..., b]) | missing[..., a]).all()
    if not exact.numel():
        return
    at = indices.clamp(min=0)
    own, slack = exact.gather(-1, at), bound.gather(-1, at)
    assert (((weights.double() - own).abs() <= slack) | missing).all()
    order = exact.sort(-1, descending=True)
    most = bound.amax(-1, keepdim=True)
    assert ((weights[..., :k].double() - order.values[..., :k]).abs() <= 2 * most + 1e-300).all()
    assert (missing[..., :k] <= (order.values[..., :k] <= 2 * most + 1e-300)).all()


def served(built: Built, backend: str) -> bool:
    problem = replace(built.problem, stats=ALL)
    return dispatch.judge(backend, problem, built.inputs).ok


COMPILED = {
    *("plain", "dtype-bfloat16", "dtype-float16-full", "decode", "softcap-bias", "alibi-batch-cross", "sinks-empty-rows"),
    *("dropout-gqa-causal", "huge-logits", "double-huge-logits", "varlen-cross", "mask-documents", "more-queries-causal"),
}
"""Cases that the compiled kernels run; all of them with TILEWISE_FUZZ, since each takes a compilation or two."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case(case: Case, backend: str) -> None:
    if backend == "cpu" and case.name not in COMPILED and not LONG:
        pytest.skip("TILEWISE_FUZZ is not set")
    built = build(case)
    if not served(built, backend):
        assert backend != "tiled"
        pytest.skip("not served")
    check(built, backend)


def test_the_cases_that_run_exist() -> None:
    assert {case.name for case in CASES} >= COMPILED


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_call(backend: str) -> None:
    @settings(max_examples=3 if backend == "cpu" and not LONG else 25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(calls())
    def run(drawn: tuple[Built, bool]) -> None:
        built, _ = drawn
        note(str(built.problem))
        if served(built, backend):
            check(built, backend)

    run()


GRADIENTS = [
    Case("plain", dtype=torch.float64, seqlen=20),
    Case("causal gqa", dtype=torch.float64, heads=4, kv_heads=2, seqlen=20, mask=lambda shape, g: tw.causal()),
    Case("blind rows", dtype=torch.float64, seqlen=24, kv_seqlen=9, mask=lambda shape, g: tw.causal() & tw.window(4)),
    Case("cap", dtype=torch.float64, seqlen=20, softcap=3.0),
    Case("bias", dtype=torch.float64, seqlen=12, bias=(1, -1, -1, -1)),
    Case("alibi", dtype=torch.float64, seqlen=20, alibi=1),
    Case("sinks", dtype=torch.float64, seqlen=20, sinks=True, mask=lambda shape, g: tw.causal()),
    Case("dropout", dtype=torch.float64, seqlen=20, dropout_p=0.3),
    Case("packed", dtype=torch.float64, lengths=((3, 0, 11), (5, 2, 11)), mask=lambda shape, g: tw.causal()),
    Case("other values", dtype=torch.float64, seqlen=20, head_dim=8, head_dim_v=24),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.name)
def test_gradients_of_output_lse_and_entropy(case: Case, backend: str) -> None:
    built = build(case)
    if case.sinks:
        built.options["sinks"] = built.options["sinks"].detach().double().requires_grad_()
    leaves = built.leaves

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, *rest = tensors
        names = [name for name in ("bias", "sinks") if isinstance(built.options.get(name), torch.Tensor)]
        moved = replace(built, q=q, k=k, v=v, options=built.options | dict(zip(names, rest, strict=True)))
        out, lse, stats = called(moved, backend, ("entropy",))
        assert stats.entropy is not None
        return out, lse.masked_fill(lse == float("-inf"), 0.0), stats.entropy

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradient_of_the_entropy_within_its_bound(dtype: torch.dtype, backend: str) -> None:
    built = build(Case("", heads=4, kv_heads=2, seqlen=150, head_dim=64, dtype=dtype, mask=lambda shape, g: tw.causal()))
    _, _, stats = called(built, backend, ("entropy",))
    assert stats.entropy is not None
    dentropy = torch.randn(stats.entropy.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(stats.entropy, (built.q, built.k), dentropy)
    inputs = Inputs(*(None if x is None else x.detach() for x in built.inputs))  # type: ignore[arg-type]
    exact = statistics.entropy_gradients(built.problem, inputs, dentropy)
    bound = statistics.entropy_gradient_bounds(built.problem, inputs, dentropy)
    for grad, name in zip(found, "qk", strict=True):
        assert outside(grad, exact[name], bound[name]) <= 1
        assert exact[name].abs().max() > 20 * bound[name].max(), "a bound that allows anything tests nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_weights_come_in_the_order_of_their_keys(backend: str) -> None:
    q = torch.ones(1, 1, 300, 16)
    k = torch.ones(1, 1, 300, 16)
    k[:, :, 200::10] = 2.0
    _, stats = tw.attention(q, k, k, mask=tw.causal(), stats=(tw.top(4),), backend=backend)  # type: ignore[call-overload]
    assert stats.top.indices[0, 0, 199].tolist() == [0, 1, 2, 3]
    assert stats.top.indices[0, 0, 299].tolist() == [200, 210, 220, 230]
    assert stats.top.indices[0, 0, 220].tolist() == [200, 210, 220, 0]
    assert stats.top.indices[0, 0, 1].tolist() == [0, 1, -1, -1]
    assert stats.top.weights[0, 0, 1].tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=8 * 4.7 * 2**-24)  # 4.7: the lse


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_asked_for_is_none(backend: str) -> None:
    q = torch.randn(1, 2, 9, 8)
    out, stats = tw.attention(q, q, q, stats=("entropy",), backend=backend)  # type: ignore[call-overload]
    assert out.shape == q.shape and stats.entropy is not None
    assert stats.max_logit is stats.key_mass is stats.top is None
    assert tw.attention(q, q, q, stats=(), backend=backend).shape == q.shape  # type: ignore[call-overload]


def test_a_sink_joins_weights_but_not_logits_and_entropy() -> None:
    q, k, v = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64)
    for backend in BACKENDS:
        _, alone = tw.attention(q, k, v, stats=ALL, backend=backend)  # type: ignore[call-overload]
        sinks = torch.tensor([3.0, 40.0], dtype=torch.float64)
        _, lse, stats = tw.attention(q, k, v, stats=ALL, sinks=sinks, return_lse=True, backend=backend)  # type: ignore[call-overload]
        torch.testing.assert_close(stats.entropy, alone.entropy)
        torch.testing.assert_close(stats.max_logit, alone.max_logit)
        left = 1 - torch.exp(sinks[:, None] - lse).sum(-1) / 12
        torch.testing.assert_close(stats.key_mass.sum(-1) / 12, left)


@pytest.mark.parametrize(
    ("shape", "kv_shape"), [((0, 2, 4, 8), (0, 2, 4, 8)), ((1, 2, 0, 8), (1, 2, 4, 8)), ((1, 2, 4, 8), (1, 2, 0, 8))]
)
def test_nothing_to_see(shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> None:
    q, k = torch.randn(shape, requires_grad=True), torch.randn(kv_shape)
    _, stats = tw.attention(q, k, k, stats=ALL)
    assert stats.max_logit is not None and stats.entropy is not None and stats.key_mass is not None and stats.top is not None
    assert (stats.max_logit == float("-inf")).all() and (stats.entropy == 0).all() and (stats.key_mass == 0).all()
    assert (stats.top.indices == -1).all() and stats.top.weights.shape == (*shape[:3], 5)
    stats.entropy.sum().backward()
    assert q.grad is not None and (q.grad == 0).all()


@pytest.mark.parametrize(
    ("stats", "error", "words"),
    [
        (("maximum",), ArgumentError, "'maximum', need max_logit, entropy, key_mass or top"),
        ("entropy", ArgumentTypeError, "need a tuple of statistics"),
        (7, ArgumentTypeError, "got int"),
        ((7,), ArgumentTypeError, "got 7"),
        (("entropy", "entropy"), ArgumentError, "twice"),
        (("top(3)", "top(4)"), ArgumentError, "largest of them alone"),
        (("top(0)",), ArgumentError, "top"),
        (("top(65)",), ArgumentError, "1 to 64"),
        (("top(٣)",), ArgumentError, "top"),
    ],
)
def test_bad_requests(stats: Any, error: type[Exception], words: str) -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(error, match=words.replace("(", r"\(")):
        tw.attention(q, q, q, stats=stats)


@pytest.mark.parametrize(
    ("k", "error"), [(0, ArgumentError), (65, ArgumentError), (True, ArgumentTypeError), (2.0, ArgumentTypeError)]
)
def test_bad_top(k: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="top"):
        tw.top(k)


def test_others_refuse_and_auto_passes_them_by() -> None:
    q = torch.randn(1, 2, 64, 32)
    for backend in ("aten", "triton", "hopper"):
        with pytest.raises(BackendError, match=r"no statistics|runs on cuda|needs compute|not installed|cannot serve"):
            tw.attention(q, q, q, stats=("entropy",), backend=backend)  # type: ignore[call-overload]
    shown = str(tw.explain(q, q, q, stats=("key_mass",)))
    assert "second sweep" in shown and "has no statistics" in shown


def test_second_derivatives_are_refused() -> None:
    q = torch.randn(1, 1, 8, 8, requires_grad=True)
    _, stats = tw.attention(q, q, q, stats=("entropy",))
    assert stats.entropy is not None
    with pytest.raises(DerivativeError, match="first derivatives only"):
        torch.autograd.grad(stats.entropy.sum(), q, create_graph=True)


def _transformed(transform: Callable[[Any, torch.Tensor], Any]) -> None:
    q = torch.randn(1, 1, 8, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        _, stats = tw.attention(x, x, x, stats=("entropy",))
        assert stats.entropy is not None
        return stats.entropy

    transform(call, q)


def test_transforms_are_refused() -> None:
    with pytest.raises(ArgumentError, match="no rules"):
        _transformed(lambda call, q: torch.func.vmap(call)(q[None]))
    with pytest.raises(ArgumentError, match="no rules"):
        _transformed(lambda call, q: torch.func.jvp(call, (q,), (q,)))
