"""`tile=`: the user's tiles, served as they are or refused with what there is."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.backends import plans, sequence
from tilewise.errors import ArgumentError, BackendError
from tilewise.hardware import device
from tilewise.problem import Problem, tile_of_text, tile_request, tile_text


def qkv(*shape: int) -> torch.Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The blocks of every sequence that plain torch computes."""
    seen: list[tuple[int, int]] = []
    make = sequence.SequenceView.__init__

    def watch(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        seen.append(self.blocks)

    monkeypatch.setattr(sequence.SequenceView, "__init__", watch)
    return seen


@pytest.mark.parametrize(
    ("tile", "request_"),
    [
        (None, ()),
        ((64, 32), (("forward", 64, 32),)),
        ([64, 32], (("forward", 64, 32),)),
        ((np.int64(64), np.int32(32)), (("forward", 64, 32),)),
        ({"forward": (64, 32), "backward": (16, 16)}, (("backward", 16, 16), ("forward", 64, 32))),
    ],
)
def test_a_pair_is_the_forwards_and_a_dict_names_passes(tile: Any, request_: Any) -> None:
    assert tile_request(tile) == request_
    assert Problem.of(heads=1, head_dim=16, seqlen=64, tile=tile).tile == request_
    assert tile_request(tile_of_text(tile_text(request_))) == request_


def test_text_without_a_pass_is_the_forwards() -> None:
    assert tile_of_text("64x32") == {"forward": (64, 32)} == tile_of_text("forward:64×32")
    with pytest.raises(ArgumentError, match="128x64"):
        tile_of_text("wide")


@pytest.mark.parametrize(
    "tile", [(64,), (64, 32, 16), (0, 32), (-1, 32), (64.0, 32), ("64", 32), 64, "64x32", (True, 32), {"forward": 64}]
)
def test_no_pair_of_positive_integers_is_refused(tile: Any) -> None:
    with pytest.raises(ArgumentError, match=r"two positive integers, \(block_q, block_k\)"):
        tw.attention(*qkv(1, 1, 8, 16), tile=tile)


def test_a_pass_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"pass 'sideways'.*forward, decode"):
        tw.attention(*qkv(1, 1, 8, 16), tile={"sideways": (16, 16)})


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "operator"])
def test_tiled_visits_the_tiles_asked_for(compiled: bool, visited: list[tuple[int, int]]) -> None:
    """Forward and backward, each by its own; through the operator too."""
    q, k, v = (x.requires_grad_() for x in qkv(2, 3, 50, 16).unbind())
    tile = {"forward": (8, 24), "backward": (16, 8)}

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, mask=tw.causal(), tile=tile, backend="tiled")

    out = (torch.compile(run, backend="eager", fullgraph=True) if compiled else run)(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert visited == [(8, 24), (16, 8)]
    want = tw.attention(q, k, v, mask=tw.causal(), backend="reference")
    torch.testing.assert_close(out, want, rtol=0, atol=2e-6)
    for grad, exact in zip(grads, torch.autograd.grad(want.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(grad, exact, rtol=0, atol=1e-5)


def test_tiled_visits_the_tiles_that_are_explained(visited: list[tuple[int, int]]) -> None:
    """200 random problems, half of them with tiles of the user's; forward and backward."""
    pick, blocks = random.Random(3), set()
    for number in range(200):
        batch, heads, m, n = pick.choice((1, 2, 40)), pick.choice((1, 2, 8)), pick.randrange(1, 20), pick.randrange(1, 20)
        q, k, v = (torch.zeros(batch, heads, length, 8, requires_grad=True) for length in (m, n, n))
        passes = [name for name in ("forward", "backward") if number % 2 and pick.random() < 0.7]
        tile = {name: (pick.randrange(4, 30), pick.randrange(4, 30)) for name in passes} or None
        call: dict[str, Any] = {"mask": pick.choice((None, tw.causal(), tw.window(3))), "tile": tile, "backend": "tiled"}
        explained = tw.explain(q, k, v, **call).to_dict()["passes"]
        visited.clear()
        tw.attention(q, k, v, **call).sum().backward()
        shown = [(explained[name]["block_q"], explained[name]["block_k"]) for name in ("forward", "backward")]
        assert visited == shown, (number, tile)
        blocks.update(shown)
    assert {(512, 512), (128, 256)} < blocks and len(blocks) > 50


def test_a_tile_never_changes_what_is_dropped() -> None:
    q, k, v = qkv(1, 2, 40, 16)
    outs = [
        tw.attention(q, k, v, dropout_p=0.5, seed=3, tile=tile, backend="tiled") for tile in (None, (8, 8), (13, 7))
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=2e-6)


def test_packed_batches_take_tiles(visited: list[tuple[int, int]]) -> None:
    q, k, v = qkv(30, 2, 16)
    cu = torch.tensor([0, 10, 30])
    out = tw.attention_varlen(q, k, v, cu, tile=(8, 8), backend="tiled")
    assert visited == [(8, 8), (8, 8)]
    torch.testing.assert_close(out, tw.attention_varlen(q, k, v, cu, backend="tiled"), rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_backends_without_tiles_of_ours_say_so(backend: str) -> None:
    with pytest.raises(BackendError, match=r"tile: \w+ has none to choose"):
        tw.attention(*qkv(1, 1, 8, 16), tile=(16, 16), backend=backend)  # type: ignore[arg-type]
    assert plans.tiles(backend, Problem.of(heads=1, head_dim=16, seqlen=8), device("cpu")) == {}


def test_a_pass_that_a_backend_does_not_have_is_refused() -> None:
    with pytest.raises(BackendError, match="tiled has no kernel 'decode'"):
        tw.attention(*qkv(1, 1, 8, 16), tile={"decode": (16, 16)}, backend="tiled")


def test_auto_takes_the_first_backend_that_has_the_tile(visited: list[tuple[int, int]]) -> None:
    """Rows of 13 are no register tile's: plain torch serves them."""
    out = tw.attention(*qkv(1, 2, 40, 16), tile=(13, 7))
    assert visited == [(13, 7)] and out.isfinite().all()


def test_another_tile_is_another_call() -> None:
    """The call cache tells tiles apart, and keeps no call whose tile cannot be hashed."""
    q, k, v = qkv(1, 2, 40, 16)
    for tile in ((8, 8), (16, 8), {"forward": (8, 8)}, None):
        for _ in range(2):
            out = tw.attention(q, k, v, tile=tile, backend="tiled")  # type: ignore[arg-type]
            torch.testing.assert_close(out, tw.attention(q, k, v, backend="reference"), rtol=0, atol=2e-6)


def test_plain_torchs_choices_begin_with_the_plan() -> None:
    problem = Problem.of(heads=4, head_dim=16, seqlen=300)
    options = plans.choices("tiled", problem, device("cpu"), "forward")
    assert options[0] == plans.tiles("tiled", problem, device("cpu"))["forward"]
    assert len(options) >= 8 and len({tile.sizes for tile in options}) == len(options)
    assert re.fullmatch(r"\d+×\d+", str(options[0]))
