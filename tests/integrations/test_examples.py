"""Each example runs, shorter than by default, and shows what it says it shows."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.integrations.example_text import TEXT

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_training_learns_and_follows_the_curve_of_plain_attention() -> None:
    """The ruler is plain attention in float64: rounding grows as training goes on, alike for both."""
    gpt = example("tiny_gpt")
    assert len(gpt.repository_text()) > 10 * gpt.CONTEXT
    text, steps = TEXT, 8

    def curve(kind: type, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(gpt.train(gpt.fresh(kind, dtype), text, steps, batch=2), dtype=torch.float64)

    ours, plain, exact = curve(gpt.Attention), curve(gpt.EagerAttention), curve(gpt.EagerAttention, torch.float64)
    assert ours[-1] < math.log(256) - 0.5  # below what a guess without knowledge costs
    error, peer = ours.sub(exact).abs().max(), plain.sub(exact).abs().max()
    assert error <= 4 * peer + 2**-24 * exact.abs().max()


def test_train_tiny_gpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "gpt.pt"
    curves = example("train_tiny_gpt").main(["--steps", "3", "--save", str(saved)])
    assert len(curves["tilewise"]) == len(curves["plain"]) == 3
    assert "nats a byte" in capsys.readouterr().out
    text = example("generate_text").main(["--model", str(saved), "--prompt", "def ", "--length", "5"])
    assert text.startswith("def ")


def test_writing_over_a_cache_is_writing_without_one() -> None:
    gpt = example("tiny_gpt")
    model = gpt.fresh().double().eval()
    assert model.write(b"attention", 12) == model.write(b"attention", 12, cached=False)


def test_swap_attention() -> None:
    found = example("swap_attention").main([])
    assert found["same"]
    # 4 layers, a few roundings of float32 each and sums of 256 terms: far above one rounding, far below a meaning
    assert found["apart"] <= 4 * 256 * 2**-24 * found["largest"]


def test_context_parallel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One process; tests/integrations/test_context_parallel.py has several."""
    context_parallel = example("context_parallel")
    monkeypatch.setattr(context_parallel, "repository_text", lambda: TEXT)
    losses = context_parallel.main(["--length", "256", "--steps", "2"])
    assert losses[1] < losses[0]
    assert "kept for gradients" in capsys.readouterr().out


def test_long_document() -> None:
    """At 8,192 tokens the scores of one layer would take 512 MiB; an eighth of that leaves room for the allocator."""
    found = example("long_document").main(["--tokens", "8192"])
    assert found["scores"] == 2 * 8192**2 * 4
    assert found["grown"] < found["scores"] / 8


def test_requests_get_what_they_would_get_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Batches change from step to step; nobody's tokens depend on who else is in them, nor on the pages they get."""
    serve = example("serve")
    torch.manual_seed(0)
    model = serve.Model().double()

    def requests() -> list[Any]:
        return [serve.Request(list(range(n, 3 * n)), 3 + n % 4) for n in (3, 1, 9, 6, 2)]

    with torch.no_grad():
        together = serve.serve(model, requests(), batch=3, pages=20, page=4)
        alone = [serve.serve(model, [one], batch=1, pages=8, page=16)[0].tokens for one in requests()]
    assert sorted(one.tokens for one in together) == sorted(alone)
    assert "tokens/s" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="more pages than there are"):
        serve.serve(model, requests(), batch=3, pages=1, page=4)
