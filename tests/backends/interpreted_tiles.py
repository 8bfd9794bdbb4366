"""Tiles in Triton's interpreter: those that are planned or asked for are those of the launches; a program of its own.

TRITON_INTERPRET=1 python -m tests.backends.interpreted_tiles
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import random
from unittest import mock

import torch
from tools.gpu_launches import PASSES, pass_of

import tilewise as tw
from tilewise.backends.gpu.record import Launch
from tilewise.backends.triton import plan, run
from tilewise.errors import BackendError
from tilewise.numerics.oracle import Inputs
from tilewise.problem import Problem

SIDES = (16, 32, 64, 128, 256)
NAMES = {
    "forward_kernel": "forward",
    **{plan.KERNELS[pass_]: name for name, pass_ in PASSES.items() if name != "decode"},
}


def watched(problem: Problem) -> list[tuple[str, tuple[int, int]]]:
    """The pass and the tile of each launch of a forward; nothing is computed."""
    found: list[tuple[str, tuple[int, int]]] = []
    dtype = getattr(torch, problem.dtype)
    q = torch.zeros((problem.batch, problem.heads, problem.seqlen_q, problem.head_dim), dtype=dtype)
    k = torch.zeros((problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim), dtype=dtype)
    tiles = plan.tiles(problem, run.spec_of(q.device))

    def note(launch: Launch) -> None:
        pass_ = pass_of(NAMES[launch.kernel.__name__], tiles)
        found.append((pass_, (launch.config.BLOCK_M, launch.config.BLOCK_N)))

    with mock.patch.object(Launch, "run", note):
        run.run_forward(problem, Inputs(q, k, k), torch.empty_like(q), torch.empty(q.shape[:3]))
    assert found and all(tiles[pass_].sizes == sizes for pass_, sizes in found), (problem, found, tiles)
    return found


def check_random() -> None:
    """200 random problems, half of them with a tile of the user's."""
    rng = random.Random(0)
    for number in range(200):
        group, kv_heads, queries = rng.choice((1, 4)), rng.choice((1, 2)), rng.choice((1, 7, 50, 300))
        tile = (rng.choice(SIDES), rng.choice(SIDES)) if number % 2 else None
        problem = Problem.of(
            heads=group * kv_heads, kv_heads=kv_heads, seqlen=queries, kv_seqlen=rng.choice((queries, 2000)),
            head_dim=rng.choice((8, 64, 96)), dtype=rng.choice(("float16", "bfloat16", "float32")), tile=tile,
        )  # fmt: skip
        found = watched(problem)
        assert not tile or ("forward", tile) in found
        shown = tw.explain(problem, device="cpu", backend="triton").plan.passes
        assert dict(found).items() <= {one.pass_: one.sizes for one in shown}.items()


def check_results() -> None:
    """With any tile the results are those of the reference, and dropout drops the same weights."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 2, 70, 16)

    def call(backend: str, tile: object = None, **more: object) -> list[torch.Tensor]:
        out = tw.attention(q, k, v, mask=tw.causal(), backend=backend, tile=tile, **more)  # type: ignore[arg-type]
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    wanted, dropped = call("reference"), call("reference", dropout_p=0.3, seed=7)
    for tile in ((16, 64), (64, 16), {"forward": (128, 32), "backward_dkdv": (16, 32), "backward_dq": (64, 64)}):
        for got, want in zip(call("triton", tile), wanted, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
        for got, want in zip(call("triton", tile, dropout_p=0.3, seed=7), dropped, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    try:
        call("triton", (48, 48))
    except BackendError as error:
        assert "triton has no 48×48 for forward" in str(error) and "powers of two from 16 to 256" in str(error), error
    else:
        raise AssertionError("48×48 was not refused")


if __name__ == "__main__":
    check_random()
    check_results()
    print("ok")
