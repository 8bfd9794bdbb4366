"""Tiles of the portable kernels that are only planned where a grid fills the device, and so by few other tests."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from tilewise import hardware
from tilewise.backends import plans
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.engine import bind_run
from tilewise.lab.bench.judge import Expected
from tilewise.lab.bench.peers import contender

LARGE: dict[str, Any] = {"dtype": "float32", "head_dim": 128, "batch": 2, "heads": 16, "seqlen": 640, "device": "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        *({"mask": mask} for mask in ("full", "causal", "causal & window(100)", "window(70, 20)")),
        {"mask": "causal", "data": "padding"},
        {"lengths": (5, 700, 0, 129, 1000)},
        {"mask": "causal", "kv_heads": 4, "kv_seqlen": 901},
        {"mask": "causal", "sinks": True, "seqlen": 601, "head_dim_v": 96, "layout": "bshd"},
    ],
    ids=str,
)
def test_the_tile_of_large_float32_calls_is_right(change: dict[str, Any]) -> None:
    case = Case("", **{**LARGE, **change}, passes="training", backend="triton")
    spec = hardware.device("cuda")
    if spec.key == "h200" and "data" not in change:
        assert plans.tiles("triton", case.problem(), spec)["forward"].sizes == (128, 64)
    tensors = case.tensors()
    judgement = Expected(case, tensors).judge(bind_run(case, contender("tilewise:triton"), tensors)())
    assert judgement.ok, judgement
