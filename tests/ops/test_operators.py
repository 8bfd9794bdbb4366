"""The operators as torch's own machinery sees them: opcheck, compile, export, autocast, checkpointing, gradcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.logging_tensor import LoggingTensorMode, capture_logs
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tests.conformance.cases import BY_NAME, build
from tilewise.api.parse import parse_call
from tilewise.backends.tiled import plan as tiled
from tilewise.ops.library import pack

OPCHECKED = [
    "plain",
    "mask-causal",
    "mask-documents",
    "cross-prefix-lm",
    "gqa",
    "bshd",
    "everything",
    "varlen-everything",
    "dropout",
    "dtype-bfloat16",
]


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setattr(tiled, "TILE_BYTES", 1)


@pytest.mark.parametrize("name", OPCHECKED)
def test_opcheck(name: str) -> None:
    built = build(BY_NAME[name])
    torch.library.opcheck(torch.ops.tilewise.attention.default, pack(built.problem, built.inputs, "tiled"))


@pytest.mark.parametrize("name", ["gqa", "everything", "mask-nothing"])
def test_opcheck_backward(name: str) -> None:
    built = build(BY_NAME[name])
    inputs = type(built.inputs)(*(x if x is None else x.detach() for x in built.inputs))
    packed = pack(built.problem, inputs, "tiled")
    out, lse = torch.ops.tilewise.attention(*packed)
    needs = [True, True, True, inputs.bias is not None, inputs.sinks is not None]
    arguments = (out, lse, torch.randn_like(out), torch.randn_like(lse), needs, *packed)
    torch.library.opcheck(torch.ops.tilewise.attention_backward.default, arguments)


@pytest.mark.parametrize("name", ["everything", "mask-documents"])
def test_opcheck_derivatives(name: str) -> None:
    built = build(BY_NAME[name])
    inputs = type(built.inputs)(*(x if x is None else x.detach() for x in built.inputs))
    packed = pack(built.problem, inputs, "tiled")
    out, lse = torch.ops.tilewise.attention(*packed)
    tangents = [x if x is None else torch.randn_like(x) for x in (*inputs[:4], inputs.sinks)]
    needs = [True, True, True, inputs.bias is not None, inputs.sinks is not None]
    torch.library.opcheck(torch.ops.tilewise.attention_jvp.default, (*tangents, *packed))
    arguments = (*tangents, out, lse, out, lse, torch.randn_like(out), torch.randn_like(lse), needs, *packed)
    torch.library.opcheck(torch.ops.tilewise.attention_double_backward.default, arguments)


def test_double_backward_under_a_dispatch_mode() -> None:
    q, k, v = (normal(1, 2, 4, 4, dtype=torch.float64) for _ in range(3))

    def second() -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(tw.attention(q, k, v).pow(2).sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.pow(2).sum() for x in first), (q, k, v))  # type: ignore[arg-type]

    expected = second()
    with LoggingTensorMode(), capture_logs() as logs:
        found = second()
    assert any("attention_double_backward" in line for line in logs)
    torch.testing.assert_close(found, expected)


def test_the_operators_have_vmap_rules() -> None:
    q, k, v = (normal(3, 1, 2, 4, 4, grad=False) for _ in range(3))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = pack(*parse_call(q, k, v, {}), "tiled")
        out, lse = torch.ops.tilewise.attention(*packed)
        needs = [True, True, True, False, False]
        return (out, *torch.ops.tilewise.attention_backward(out, lse, out * 2, None, needs, *packed)[:3])

    each = [call(*x) for x in zip(q, k, v, strict=True)]
    for found, expected in zip(torch.func.vmap(call)(q, k, v), zip(*each, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected))


def test_the_operator_and_the_eager_call_agree() -> None:
    built = build(BY_NAME["everything"])
    eager = built.call("tiled")
    operator = torch.ops.tilewise.attention(*pack(built.problem, built.inputs, "tiled"))
    assert torch.equal(eager[0].transpose(1, 2), operator[0]) and torch.equal(eager[1], operator[1])
    upstream = torch.randn_like(operator[0])
    for a, b in zip(
        torch.autograd.grad(eager[0], built.leaves, upstream.transpose(1, 2)),
        torch.autograd.grad(operator[0], built.leaves, upstream),
        strict=True,
    ):
        assert torch.equal(a, b)


def compiled(function: Any, dynamic: bool | None = None) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter), counter


@pytest.mark.parametrize(
    ("mask", "ids"),
    [
        ("causal & window(9)", False),
        ("causal | prefix(3)", False),
        ("~window(5) | causal(top_left)", False),
        ("causal", True),
    ],
)
def test_compile_takes_every_length_with_one_more_compilation(mask: str, ids: bool) -> None:
    """The first length compiles, the second shows that lengths move, and no later one compiles again."""
    value = tw.masks.parse(mask)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        full = value & tw.documents(documents) if ids else value
        return tw.attention(q, k, v, mask=full, softcap=3.0)  # type: ignore[return-value]

    fast, counter = compiled(attend)
    for length in (17, 33, 48, 70, 101):
        q, k, v = (normal(2, 2, length, 8) for _ in range(3))
        documents = torch.arange(length) // 7
        out, expected = fast(q, k, v, documents), attend(q, k, v, documents)
        assert torch.equal(out, expected)
        upstream = torch.randn_like(out)
        for a, b in zip(
            torch.autograd.grad(out, (q, k, v), upstream),
            torch.autograd.grad(expected, (q, k, v), upstream),
            strict=True,
        ):
            assert torch.equal(a, b)
    assert counter.frame_count <= 2


def test_compile_varlen_bias_and_dropout() -> None:
    def attend(q: torch.Tensor, cu: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return tw.attention_varlen(q, q, q, cu, mask=tw.causal(), bias=bias, dropout_p=0.3, seed=5)  # type: ignore[return-value]

    fast, counter = compiled(attend)
    for lengths in ((3, 9), (20, 1), (4, 40)):
        q, bias = normal(sum(lengths), 2, 8), normal(1, 2, max(lengths), max(lengths))
        cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
        out, expected = fast(q, cu, bias), attend(q, cu, bias)
        assert torch.equal(out, expected)
        out.sum().backward()
    assert counter.frame_count <= 2


def test_export_with_a_dynamic_length() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return tw.attention(q, k, v, mask=tw.causal() & tw.window(6))  # type: ignore[return-value]

    length = torch.export.Dim("length", min=2, max=4096)
    example = tuple(normal(1, 2, 30, 8, grad=False) for _ in range(3))
    program = torch.export.export(Model(), example, dynamic_shapes=[{2: length}] * 3)
    q, k, v = (normal(1, 2, 51, 8, grad=False) for _ in range(3))
    assert torch.equal(program.module()(q, k, v), Model()(q, k, v))


def test_fake_tensors_give_shapes_without_work() -> None:
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(2, 40, 8, 64, dtype=torch.bfloat16)
        out, lse = tw.attention(q, q, q[..., :32], layout="bshd", return_lse=True, mask=tw.causal())
    assert out.shape == (2, 40, 8, 32) and out.is_contiguous() and out.dtype == torch.bfloat16
    assert lse.shape == (2, 8, 40) and lse.dtype == torch.float32


def test_autocast_does_what_sdpa_does() -> None:
    q, k, v = normal(1, 2, 20, 16), normal(1, 2, 20, 16, dtype=torch.bfloat16), normal(1, 2, 20, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        peer = torch.nn.functional.scaled_dot_product_attention(q, k.float(), v)
        ours = tw.attention(q, k.float(), v)
        double = tw.attention(*(normal(1, 1, 4, 4, dtype=torch.float64) for _ in range(3)))
    assert ours.dtype == peer.dtype == torch.bfloat16
    assert double.dtype == torch.float64
    assert torch.equal(ours, tw.attention(q.bfloat16(), k, v.bfloat16()))


def test_checkpointing_replays_dropout() -> None:
    q, k, v = (normal(1, 2, 40, 8) for _ in range(3))

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return tw.attention(*qkv, dropout_p=0.4)  # type: ignore[return-value]

    torch.manual_seed(3)
    plain = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(3)
    replayed = torch.autograd.grad(checkpoint(attend, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
    for a, b in zip(plain, replayed, strict=True):
        assert torch.equal(a, b)


def test_an_unseeded_call_draws_a_new_mask_each_time() -> None:
    q, k, v = (normal(1, 1, 40, 8, grad=False) for _ in range(3))
    assert not torch.equal(tw.attention(q, k, v, dropout_p=0.5), tw.attention(q, k, v, dropout_p=0.5))


GRADCHECKED = {
    "plain": {},
    "causal-gqa": {"heads": 4, "mask": tw.causal()},
    "bias": {"bias": (1, 2, 5, 7)},
    "bias-broadcast": {"bias": (5, 1)},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 1.5},
    "window-softcap-bias-sinks": {"mask": tw.window(3, 2), "softcap": 2.0, "bias": (2, 1, 1, 7), "sinks": True},
    "empty-rows": {"mask": tw.causal("top_left") & ~tw.prefix(2)},
    "dropout": {"dropout_p": 0.4, "seed": 11},
}


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradcheck(name: str) -> None:
    """Out and LSE are differentiable in every input, to the accuracy of fp64 finite differences."""
    options: dict[str, Any] = dict(GRADCHECKED[name])
    heads = options.pop("heads", 2)
    shape, sinks = options.pop("bias", None), options.pop("sinks", False)
    leaves = [
        normal(2, heads, 5, 3, dtype=torch.float64),
        normal(2, 2, 7, 3, dtype=torch.float64),
        normal(2, 2, 7, 4, dtype=torch.float64),
    ]
    if shape:
        leaves.append(normal(*shape, dtype=torch.float64))
    if sinks:
        leaves.append(normal(heads, dtype=torch.float64))

    def attend(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = list(tensors[3:])
        extra = {"bias": rest.pop(0)} if shape else {}
        extra |= {"sinks": rest.pop(0)} if sinks else {}
        out, lse = tw.attention(*tensors[:3], return_lse=True, backend="tiled", **options, **extra)
        return out, torch.where(lse.isinf(), 0.0, lse)

    assert torch.autograd.gradcheck(attend, leaves)
