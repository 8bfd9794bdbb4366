"""`output_attentions=True`: the weights eager returns, from a second pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.integrations.transformers import register
from tilewise.integrations.transformers.attention import attention_function

transformers = pytest.importorskip("transformers")

from tests.integrations.models import CASES, PADDING, Case  # noqa: E402  # it needs transformers

U = 2.0**-24
NAMES = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_are_those_of_eager(case: Case) -> None:
    """Layer by layer. Scores of a few units, each off by a few dozen roundings in either run; padded rows see nothing here."""
    model, inputs = case.build("cpu", torch.float32), case.batch("cpu")
    answers = []
    for name in ("tilewise", "eager"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            answers.append(model(**inputs, output_attentions=True))
    if not any(getattr(answers[1], name, None) for name in NAMES):
        pytest.skip("this version of transformers returns no weights of its own here")
    compared = 0
    for name in NAMES:
        ours, eager = (getattr(answer, name, None) for answer in answers)
        assert (ours is None) == (eager is None)
        if eager is None:
            continue
        assert len(ours) == len(eager)
        for got, want in zip(ours, eager, strict=True):
            if case.name in ("llama", "mistral", "qwen3", "gemma2", "gpt_oss"):
                got, want = got[:, :, PADDING:], want[:, :, PADDING:]
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            assert (got - want).abs().max() <= 256 * U
            compared += 1
    assert compared >= 2


def test_weights_carry_gradients_and_the_same_dropout() -> None:
    """out is weights · V, with dropout too, so both come from the same draw; a loss on the weights reaches q and k."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 7, 8, generator=g, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    out, weights = attention_function(torch.nn.Module(), q, k, v, None, dropout=0.4, output_attentions=True)
    assert weights is not None
    assert torch.allclose(out, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2), rtol=0, atol=1e-14)
    assert (weights[:, :, -1] == 0).any()  # dropped: the last row sees every key
    weights.square().sum().backward()
    assert q.grad is not None and k.grad is not None
    assert q.grad.abs().max() > 0 and k.grad.abs().max() > 0


@pytest.mark.parametrize("length", [1, 5, 700])
def test_weights_of_a_row_sum_to_one(length: int) -> None:
    x = torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(0))
    features: dict[str, Any] = {"output_attentions": True}
    _, weights = attention_function(torch.nn.Module(), x, x, x, None, **features)
    assert weights is not None
    assert weights.shape == (1, 2, length, length)
    assert (weights.sum(-1) - 1).abs().max() <= (length + 16) * U
    assert not weights.triu(1).any()


def test_rows_that_see_nothing_have_no_weights() -> None:
    x = torch.randn(1, 1, 3, 8, requires_grad=True)
    seen = torch.tensor([[True, False, False], [False] * 3, [True] * 3])[None, None]
    _, weights = attention_function(torch.nn.Module(), x, x, x, seen, output_attentions=True)
    assert weights is not None
    assert weights[0, 0, 1].tolist() == [0, 0, 0]
    weights.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_weights_inside_a_compiled_graph() -> None:
    x, module = torch.randn(2, 2, 16, 8), torch.nn.Module()
    run = lambda q: attention_function(module, q, q, q, None, output_attentions=True)[1]  # noqa: E731
    assert torch.equal(torch.compile(run, backend="eager", fullgraph=True)(x), run(x))
