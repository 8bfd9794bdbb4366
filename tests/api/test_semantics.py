"""The semantics as users read them: small facts with answers known by hand, on every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.conformance.harness import BACKENDS, attention, attention_varlen
from tilewise import dispatch
from tilewise.backends import plans
from tilewise.backends.base import Backend, Verdict
from tilewise.backends.tiled import plan as tiled
from tilewise.errors import ArgumentError, BackendError
from tilewise.problem import Problem

INF = float("inf")
backends = pytest.mark.parametrize("backend", BACKENDS)


def visible(mask: tw.Mask | None, sq: int, sk: int, backend: str, **options: Any) -> list[str]:
    """Which keys each query sees, read off an attention: equal scores and one-hot values give 1 / n to each key seen."""
    q, k, v = torch.zeros(1, 1, sq, 4), torch.zeros(1, 1, sk, 4), torch.eye(sk)[None, None]
    weights = attention(q, k, v, mask=mask, backend=backend, **options)[0, 0]
    for row in weights:
        seen = row[row > 0]
        torch.testing.assert_close(seen, torch.full_like(seen, 1 / max(len(seen), 1)))
    return ["".join("x" if weight > 0 else "." for weight in row) for row in weights]


SEEN: dict[str, tuple[tw.Mask | None, list[str]]] = {
    "no mask": (None, ["xxxxx", "xxxxx", "xxxxx"]),
    "causal is bottom-right": (tw.causal(), ["xxx..", "xxxx.", "xxxxx"]),
    "causal top-left": (tw.causal("top_left"), ["x....", "xx...", "xxx.."]),
    "causal with an offset": (tw.causal(offset=1), ["xx...", "xxx..", "xxxx."]),
    "causal with a negative offset": (tw.causal(offset=-1), [".....", "x....", "xx..."]),
    "window(n) keeps n keys": (tw.window(2), [".xx..", "..xx.", "...xx"]),
    "window(n) is window(n - 1, 0)": (tw.window(1, 0), [".xx..", "..xx.", "...xx"]),
    "window on both sides": (tw.window(1, 1), [".xxx.", "..xxx", "...xx"]),
    "window top-left": (tw.window(1, 2, align="top_left"), ["xxx..", "xxxx.", ".xxxx"]),
    "window with an offset": (tw.window(2, offset=1), ["xx...", ".xx..", "..xx."]),
    "prefix": (tw.prefix(2), ["xx...", "xx...", "xx..."]),
    "prefix-LM": (tw.causal("top_left") | tw.prefix(2), ["xx...", "xx...", "xxx.."]),
    "padding": (tw.key_padding([3]), ["xxx..", "xxx..", "xxx.."]),
    "left padding": (tw.key_padding([2], start=[3]), ["...xx", "...xx", "...xx"]),
    "documents": (tw.documents([7, 7, 8, 8, 8], q_ids=[7, 8, 9]), ["xx...", "..xxx", "....."]),
    "blocks": (tw.blocks(torch.tensor([[1, 0, 1], [0, 1, 0]]).bool(), 2), ["xx..x", "xx..x", "..xx."]),
    "dense": (tw.dense(torch.eye(3, 5).bool()), ["x....", ".x...", "..x.."]),
    "and": (tw.causal() & tw.window(3), ["xxx..", ".xxx.", "..xxx"]),
    "not": (~tw.causal(), ["...xx", "....x", "....."]),
    "nothing": (~tw.full(), [".....", ".....", "....."]),
}


@backends
@pytest.mark.parametrize("name", SEEN)
def test_who_sees_what(backend: str, name: str) -> None:
    mask, picture = SEEN[name]
    assert visible(mask, 3, 5, backend) == picture


@backends
def test_more_queries_than_keys(backend: str) -> None:
    assert visible(tw.causal(), 5, 3, backend) == ["...", "...", "x..", "xx.", "xxx"]
    assert visible(tw.causal("top_left"), 5, 3, backend) == ["x..", "xx.", "xxx", "xxx", "xxx"]


@backends
def test_offsets_of_each_sequence(backend: str) -> None:
    """A static cache: the queries of each sequence start at a position of their own."""
    v = torch.eye(5).expand(2, 1, 5, 5)
    mask = tw.causal(offset=torch.tensor([0, 3]))
    weights = attention(torch.zeros(2, 1, 2, 4), torch.zeros(2, 1, 5, 4), v, mask=mask, backend=backend)
    assert [(row > 0).sum().item() for row in weights.flatten(0, 2)] == [1, 2, 4, 5]


@backends
def test_order_of_the_score(backend: str) -> None:
    """scale, then softcap, then bias, then mask, then the sink: one row by hand."""
    q, k = torch.full((1, 1, 1, 1), 2.0), torch.tensor([1.0, 3.0, 5.0, 9.0]).reshape(1, 1, 4, 1)
    bias, sink = torch.tensor([0.5, -1.0, 0.25, 0.0]), 0.75
    options: dict[str, Any] = {"scale": 0.5, "softcap": 2.0, "bias": bias, "mask": tw.prefix(3)}
    out, lse = attention(
        q, k, torch.eye(4)[None, None], sinks=torch.tensor([sink]), return_lse=True, backend=backend, **options
    )  # fmt: skip
    logits = [2.0 * math.tanh(0.5 * 2.0 * x / 2.0) + b for x, b in zip((1.0, 3.0, 5.0), bias.tolist(), strict=False)]
    total = sum(map(math.exp, [*logits, sink]))
    torch.testing.assert_close(lse, torch.full((1, 1, 1), math.log(total)))
    torch.testing.assert_close(out.flatten(), torch.tensor([*(math.exp(x) / total for x in logits), 0.0]))


@backends
def test_scale_is_one_over_the_root_of_the_query_dim(backend: str) -> None:
    q, k, v = torch.randn(1, 1, 4, 9), torch.randn(1, 1, 4, 9), torch.randn(1, 1, 4, 25)
    torch.testing.assert_close(
        attention(q, k, v, backend=backend), attention(q, k, v, scale=1 / 3, backend=backend), rtol=0, atol=0
    )


@backends
def test_query_heads_share_key_heads_in_groups(backend: str) -> None:
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    out = attention(q, k, v, backend=backend)
    for head in range(4):
        alone = attention(q[:, head : head + 1], k[:, [head // 2]], v[:, [head // 2]], backend=backend)
        torch.testing.assert_close(out[:, head : head + 1], alone)


@backends
def test_alibi_is_a_bias_by_distance(backend: str) -> None:
    sq, sk = 3, 6
    q, k, v = torch.randn(1, 2, sq, 8), torch.randn(1, 2, sk, 8), torch.randn(1, 2, sk, 8)
    slopes = torch.tensor([0.5, 0.125])
    distance = (torch.arange(sq)[:, None] + sk - sq - torch.arange(sk)).abs()
    dense = -slopes[:, None, None] * distance
    torch.testing.assert_close(
        attention(q, k, v, bias=tw.alibi(slopes), backend=backend),
        attention(q, k, v, bias=dense, backend=backend),
    )


@backends
def test_rows_without_keys(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    mask, sinks = tw.key_padding([0]), torch.tensor([0.5, -INF])
    out, lse = attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    assert (out == 0).all() and (lse == -INF).all()
    out, lse = attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, backend=backend)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(1, 2, 3))
    with_sink = attention(q, k, v, sinks=torch.full((2,), -INF), backend=backend)
    torch.testing.assert_close(with_sink, attention(q, k, v, backend=backend), rtol=0, atol=0)


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes_and_shapes_of_results(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3)))
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    assert out.shape == (2, 4, 5, 3) and out.dtype == dtype
    assert lse.shape == (2, 4, 5) and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    swapped, same = attention(
        *(x.transpose(1, 2) for x in (q, k, v)), layout="bshd", return_lse=True, backend=backend
    )  # fmt: skip
    torch.testing.assert_close((swapped.transpose(1, 2), same), (out, lse))
    packed, flat = attention_varlen(
        *(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 5]), torch.tensor([0, 7]), return_lse=True, backend=backend
    )  # fmt: skip
    torch.testing.assert_close((packed.transpose(0, 1), flat), (out[0], lse[0]))


@backends
def test_each_gradient_alone_is_the_one_in_company(backend: str) -> None:
    shapes = {"q": (2, 4, 40, 8), "k": (2, 2, 50, 8), "v": (2, 2, 50, 6), "bias": (4, 40, 50), "sinks": (4,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}

    def gradients(*names: str, use: tuple[int, ...] = (0, 1)) -> dict[str, torch.Tensor]:
        given = {name: x.detach().requires_grad_(name in names) for name, x in tensors.items()}
        results = attention(**given, mask=tw.causal(), return_lse=True, deterministic=True, backend=backend)
        total = sum(results[i].square().sum() for i in use)
        return dict(zip(names, torch.autograd.grad(total, [given[name] for name in names]), strict=True))

    together = gradients(*shapes)
    for name in shapes:
        torch.testing.assert_close(gradients(name)[name], together[name])
    parts = gradients(*shapes, use=(0,)), {**gradients("q", "k", "bias", "sinks", use=(1,)), "v": torch.tensor(0.0)}
    for name in shapes:
        torch.testing.assert_close(parts[0][name] + parts[1][name], together[name])


@backends
def test_inference_mode_and_no_grad(backend: str) -> None:
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    want = attention(q, q, q, backend=backend)
    assert want.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = attention(q, q, q, backend=backend)
        assert not out.requires_grad and torch.equal(out, want)
    with torch.inference_mode():
        frozen = torch.randn(1, 2, 9, 8)
    assert attention(frozen, frozen, frozen, backend=backend).shape == q.shape


def kept(backend: str, b: int, h: int, s: int, p: float, **options: Any) -> torch.Tensor:
    """The dropout mask of a call, read off its weights: (B, H, S, S)."""
    q = torch.zeros(b, h, s, 4)
    out = attention(q, q, torch.eye(s).expand(b, h, s, s), dropout_p=p, backend=backend, **options)
    keep = out > 0
    torch.testing.assert_close(out, torch.where(keep, 1 / (s * (1 - p)), 0.0))
    return keep


@backends
def test_dropout_depends_on_the_seed_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    b, h, s, p, seed = 2, 3, 70, 0.4, 12345678901234567
    keep = kept(backend, b, h, s, p, seed=seed)
    assert torch.equal(keep, kept("reference", b, h, s, p, seed=torch.tensor(seed)))
    assert not torch.equal(keep, kept(backend, b, h, s, p, seed=seed + 1))
    assert not torch.equal(keep, kept(backend, b, h, s, p, seed=seed + (1 << 32))), "the high half of the seed counts"
    monkeypatch.setattr(tiled, "TILE_BYTES", 1)
    assert torch.equal(keep, kept(backend, b, h, s, p, seed=seed)), "tiles do not matter"
    zero = torch.zeros(b, s, h, 4)
    values = torch.eye(s)[:, None].expand(b, s, h, s)
    swapped = attention(zero, zero, values, dropout_p=p, seed=seed, layout="bshd", backend=backend)
    assert torch.equal(swapped.transpose(1, 2) > 0, keep), "layout does not matter"
    cu = torch.arange(0, b * s + 1, s)
    flat = (x.flatten(0, 1) for x in (zero, zero, values))
    packed = attention_varlen(*flat, cu, dropout_p=p, seed=seed, backend=backend)
    assert torch.equal(packed.unflatten(0, (b, s)).transpose(1, 2) > 0, keep), "q and k count within the sequence"


@backends
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share(backend: str, p: float) -> None:
    keep = kept(backend, 4, 4, 64, p, seed=7).double()
    n = keep.numel()
    limit = 5 * math.sqrt(p * (1 - p) / n)  # five standard deviations
    assert abs(keep.mean() - (1 - p)) < limit
    for axis in range(4):  # nor does any sequence, head, row or column stand out
        others = [other for other in range(4) if other != axis]
        spread = (keep.mean(others) - (1 - p)).abs().max()
        assert spread < 5.5 * math.sqrt(p * (1 - p) / (n / keep.shape[axis]))


def test_dropout_without_a_seed_follows_torch() -> None:
    torch.manual_seed(3)
    first = kept("tiled", 1, 1, 40, 0.5)
    assert not torch.equal(first, kept("tiled", 1, 1, 40, 0.5))
    torch.manual_seed(3)
    assert torch.equal(first, kept("tiled", 1, 1, 40, 0.5))


@backends
def test_deterministic_is_bitwise(backend: str) -> None:
    leaves = [torch.randn(2, h, 90, 16, requires_grad=True) for h in (4, 2, 2)]
    runs = []
    for _ in range(3):
        out, lse = attention(*leaves, mask=tw.causal(), deterministic=True, return_lse=True, backend=backend)
        runs.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)])
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


def test_deterministic_follows_torch_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    tiled = dispatch.get("tiled")
    plain = tiled.forward
    monkeypatch.setattr(
        tiled, "forward", lambda problem, inputs: (seen.append(problem.deterministic), plain(problem, inputs))[1]
    )
    q = torch.randn(1, 1, 4, 4)
    for switch in (False, True):
        torch.use_deterministic_algorithms(switch)
        try:
            for told in (None, True, False):
                tw.attention(q, q, q, deterministic=told, backend="tiled")
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True, False, True, True, False]


def test_backends_says_what_is_usable() -> None:
    verdicts = tw.backends("cpu")
    assert list(verdicts) == list(dispatch.REGISTRY) and verdicts["tiled"] == Verdict(True)
    assert all(isinstance(v, Verdict) and (v.ok or v.reasons) for v in verdicts.values())
    nowhere = tw.backends("mps")
    assert all(not v.ok and "mps" in " ".join(v.reasons) for v in nowhere.values())
    assert tw.backends().keys() == verdicts.keys()


class Stubborn(Backend):
    """A backend that can do nothing, or everything but the backward."""

    name = "stubborn"

    def __init__(self, forward_only: bool) -> None:
        self.forward_only = forward_only

    def usable(self, device: str) -> Verdict:
        return Verdict(True)

    def supports(self, problem: Problem, inputs: Any = None, *, backward: bool = False) -> Verdict:
        return (
            Verdict(True) if self.forward_only and not backward else Verdict(False, ("it is stubborn", "it is a test"))
        )

    def forward(self, problem: Problem, inputs: Any) -> Any:
        return dispatch.get("tiled").forward(problem, inputs)


@pytest.fixture
def stubborn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers it in front of all others."""

    def register(forward_only: bool) -> None:
        backend = Stubborn(forward_only)
        entries = {"stubborn": dispatch.Entry("stubborn", ("cpu",)), **dispatch.REGISTRY}
        for module in (dispatch, plans):
            monkeypatch.setattr(module, "REGISTRY", entries)
        load = dispatch._load
        monkeypatch.setattr(dispatch, "_load", lambda module: backend if module == "stubborn" else load(module))

    return register


def test_an_explicit_backend_never_falls_back(stubborn: Any) -> None:
    stubborn(forward_only=False)
    q = torch.randn(1, 1, 4, 4)
    assert tw.attention(q, q, q).shape == q.shape
    with pytest.raises(BackendError, match="it is stubborn; it is a test") as caught:
        tw.attention(q, q, q, backend="stubborn")
    assert caught.value.verdicts == {"stubborn": ("it is stubborn", "it is a test")}


def test_a_forward_only_backend_leaves_the_backward_to_others_unless_asked_for(stubborn: Any) -> None:
    stubborn(forward_only=True)
    q = torch.randn(1, 1, 6, 4, requires_grad=True)
    (auto,) = torch.autograd.grad(tw.attention(q, q, q).sum(), q)
    (tiled,) = torch.autograd.grad(tw.attention(q, q, q, backend="tiled").sum(), q)
    torch.testing.assert_close(auto, tiled)
    with torch.no_grad():
        assert tw.attention(q, q, q, backend="stubborn").shape == q.shape
    with pytest.raises(BackendError, match="it is stubborn"):
        tw.attention(q, q, q, backend="stubborn")


def test_when_nobody_serves_every_backend_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    no = Verdict(False, ("not today",))
    tiled = dispatch.get("tiled")
    monkeypatch.setattr(tiled, "supports", lambda *args, **kwargs: no)
    monkeypatch.setattr(dispatch, "REGISTRY", {name: dispatch.REGISTRY[name] for name in ("tiled", "reference")})
    with pytest.raises(BackendError) as caught:
        tw.attention(*(torch.randn(3, 1, 7, 11) for _ in range(3)))
    assert caught.value.verdicts["tiled"] == ("not today",)
    assert "N × N" in caught.value.verdicts["reference"][0], "never a silent O(N²)"
    assert "tiled: not today" in str(caught.value)


def test_a_backend_registered_later_is_asked_too(stubborn: Any) -> None:
    """Calls are remembered by their shapes; a new backend makes the memory void."""
    q = torch.randn(1, 1, 5, 4)
    tw.attention(q, q, q)
    stubborn(forward_only=True)
    asked: list[str] = []
    backend = dispatch.get("stubborn")
    backend.forward = lambda *given: (asked.append("stubborn"), Stubborn.forward(backend, *given))[1]  # type: ignore[method-assign, arg-type]
    tw.attention(q, q, q)
    assert asked == ["stubborn"]


def test_registered_names_are_taken() -> None:
    with pytest.raises(ArgumentError, match="registered already"):
        dispatch.register("tiled", dispatch.Entry("anything", ("cpu",)))
