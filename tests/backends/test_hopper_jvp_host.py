"""What is planned, refused and launched of the Hopper JVP, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tools.compile_checks import BY_NAME
from tools.compile_kernels import compile_check, faults

import tilewise as tw
from tests.backends.test_gpu_hopper_launch import flat
from tests.backends.test_gpu_record import Compiled, kernel
from tilewise.backends.base import Inputs, Tangents
from tilewise.backends.gpu.launch import Descriptor
from tilewise.backends.gpu.record import Recorder
from tilewise.backends.hopper import packed_order, plan
from tilewise.backends.hopper.config import REGISTERS, SHARED_BYTES
from tilewise.backends.hopper.jvp import launch
from tilewise.backends.hopper.jvp.config import WIDTHS, tile_for
from tilewise.hardware import lookup
from tilewise.problem import Problem

__all__ = ["kernel"]
H200 = lookup("h200")
SIZES: dict[str, Any] = {"batch": 2, "heads": 4, "seqlen": 512, "dtype": "bfloat16", "device": "cuda"}


@pytest.mark.slow
def test_machine_code() -> None:
    check = BY_NAME["hopper-jvp d128 causal"]
    (compiled,) = compile_check(check, "sm_90")
    assert faults(check, compiled, "sm_90")[1] == []


@pytest.mark.parametrize("dims", [(d, dv) for d in WIDTHS for dv in WIDTHS], ids=str)
def test_budgets(dims: tuple[int, int]) -> None:
    config = tile_for(*dims)
    assert sum(config.tiles.values()) <= SHARED_BYTES - 2048
    assert config.WARPGROUPS * config.REGISTERS[0] + config.REGISTERS[1] <= REGISTERS
    assert config.REGISTERS[0] > config.BLOCK_DV + config.BLOCK_N  # two accumulators and two tiles of scores, half a warpgroup's


def test_the_plan_has_the_kernel_that_runs() -> None:
    tile = plan.derivative_tiles(Problem.of(**SIZES, head_dim=128, mask=tw.causal()), H200, "jvp")["jvp"]
    assert (tile.kernel, tile.sizes, tile.stages, tile.warps, tile.registers) == ("jvp_kernel", (128, 64), 2, 12, 240)
    assert tile.on_chip_bytes <= SHARED_BYTES
    assert plan.derivative_tiles(Problem.of(**SIZES, head_dim=64), H200, "jvp")["jvp"].sizes == (128, 128)
    asked = Problem.of(**SIZES, head_dim=128, tile={"jvp": (128, 64)})
    assert plan.supports(asked, H200, backward=True).ok and plan.choices(asked, H200, "jvp")[0].source == "user"


REFUSED: dict[str, dict[str, Any]] = {
    "head dims up to 128, found 256": {"head_dim": 256},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.1},
    "bias": {"bias": (2, 4, 512, 512)},
    "tables or ids": {"mask": tw.documents(torch.zeros(2, 512, dtype=torch.int32))},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_has_a_reason(reason: str) -> None:
    problem = Problem.of(**{**SIZES, "head_dim": 64, **REFUSED[reason]})
    verdict = plan.derives(problem, H200, derivative="jvp")
    assert not verdict.ok and reason in "; ".join(verdict.reasons)


def test_there_is_no_double_backward() -> None:
    assert not plan.derives(Problem.of(**SIZES, head_dim=64), H200, derivative="double_backward").ok


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, kernel: Compiled) -> Recorder:
    fresh = Recorder()
    monkeypatch.setattr(launch, "recorder", fresh)
    monkeypatch.setattr(launch, "spec_of", lambda index: H200)
    monkeypatch.setattr(launch, "kernel_for", lambda *_: kernel)
    monkeypatch.setattr(packed_order, "recorder", fresh)
    return fresh


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("moving", ["qkv", "q", "kv"])
def test_launches_have_the_tensors_of_their_call(recorder: Recorder, kernel: Compiled, moving: str, varlen: bool) -> None:
    problem = Problem.of(**{**SIZES, "seqlen": 64, "head_dim": 64}, mask=tw.causal(), varlen=varlen)
    rows = 1 if varlen else 2
    cu = torch.tensor([0, 30, 64], dtype=torch.int32) if varlen else None
    for seed in range(4):  # recorded, then repeated
        g = torch.Generator().manual_seed(seed)
        q, k, v, *tangents = (torch.randn(rows, 4, 64, 64, generator=g).bfloat16() for _ in range(6))
        broken = tangents[1].mT.contiguous().mT  # no tensor map describes it
        each = zip((tangents[0], broken, tangents[2]), "qkv", strict=True)
        along = Tangents(*(x if name in moving else None for x, name in each))
        kernel.launched.clear()
        found = launch.run_jvp(problem, Inputs(q, k, v, cu_q=cu, cu_k=cu), along)
        given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in flat(tuple(kernel.launched[-1]))]
        present = [x for x in (along.q, along.v, q, k, v, *found) if x is not None]
        assert all(x.data_ptr() in given for x in present)
        assert broken.data_ptr() not in given
        assert sum(isinstance(x, Descriptor) for x in kernel.launched[-1]) == 5 + len(moving)
