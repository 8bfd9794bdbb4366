"""Hopper's launches through the recorder: a repeated call has its own tensors, whatever it has recorded before."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tests.backends.test_gpu_record import Compiled, kernel
from tilewise.backends.base import BackwardInputs, Grads, Inputs
from tilewise.backends.gpu.launch import Descriptor
from tilewise.backends.gpu.record import Recorder
from tilewise.backends.hopper import launch as forward
from tilewise.backends.hopper import packed_order
from tilewise.backends.hopper.backward import launch as backward
from tilewise.hardware import lookup
from tilewise.problem import Problem

__all__ = ["kernel"]
MASKS = {"full": None, "causal": tw.causal(), "padding": tw.key_padding(torch.tensor([50, 33]))}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, kernel: Compiled) -> Recorder:
    fresh = Recorder()
    for module in (forward, backward):
        monkeypatch.setattr(module, "recorder", fresh)
        monkeypatch.setattr(module, "spec_of", lambda index: lookup("h200"))
        monkeypatch.setattr(module, "kernel_for", lambda *_: kernel)
    monkeypatch.setattr(packed_order, "recorder", fresh)
    return fresh


def flat(value: Any) -> list[Any]:
    if isinstance(value, Descriptor):
        return [value.base.data_ptr(), value.shape, value.strides, value.block_shape]
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, tuple) else [value]


def call(
    problem: Problem, seed: int, kernel: Compiled, broken: bool = False, part: bool = False
) -> tuple[list[list[Any]], dict[int, str]]:
    """The arguments of all kernels of a forward and a backward, and the names of the addresses among them."""
    rows = 1 if problem.varlen else problem.batch
    torch.manual_seed(seed)
    q, k, v, dout = (torch.randn(rows, problem.heads, problem.seqlen_q, 64).half() for _ in range(4))
    cu = torch.arange(0, problem.batch + 1, dtype=torch.int32) * (problem.seqlen_q // problem.batch)
    inputs = Inputs(q, k, v, cu_q=cu, cu_k=cu) if problem.varlen else Inputs(q, k, v)
    kernel.launched.clear()
    out, lse = forward.run_forward(problem, inputs)
    if broken:
        dout = dout.transpose(2, 3).contiguous().transpose(2, 3)
    if part:
        lse = torch.cat([lse, lse], 2)[:, :, : problem.seqlen_q]
    grads = backward.run_backward(problem, inputs, BackwardInputs(out, lse, dout, torch.zeros_like(lse)))
    assert isinstance(grads, Grads)
    names = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "cu": cu}
    names |= {name: x for name, x in zip(("dq", "dk", "dv"), grads, strict=False) if x is not None}
    return [flat(args) for args in kernel.launched], {x.data_ptr(): name for name, x in names.items()}


def named(launched: list[list[Any]], names: dict[int, str]) -> list[list[Any]]:
    return [[names.get(x, x) if isinstance(x, int) else x for x in args if not isinstance(x, int) or x in names or x < 2**20]
            for args in launched]  # fmt: skip


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_repeated_call_has_its_own_tensors(recorder: Recorder, kernel: Compiled, mask: str, varlen: bool) -> None:
    problem = Problem.of(
        batch=2, heads=4, seqlen=64, head_dim=64, dtype="float16", mask=MASKS[mask], varlen=varlen, device="cuda"
    )
    first, names = call(problem, 0, kernel)
    assert len(first) == (6 if varlen else 4)  # a packed batch has its tiles ordered before each kernel
    # a kernel that Triton compiles is given tensors in the first call, and addresses from then on
    kept = call(problem, 2, kernel) if varlen else (first, names)
    second, other = call(problem, 1, kernel)
    assert named(second, other) == named(*kept)
    assert {name for args in named(second, other) for name in args if isinstance(name, str)} >= set(other.values()) - {
        "cu"
    }
    assert len(recorder._recordings) == (4 if varlen else 2)


def test_a_tensor_in_two_places_is_not_taken_for_one_argument(recorder: Recorder, kernel: Compiled) -> None:
    """attention(x, x, x), and then with three tensors."""
    problem = Problem.of(batch=2, heads=4, seqlen=64, head_dim=64, dtype="float16", device="cuda")
    for places in ("aaa", "abc", "aba", "bca", "bbb"):
        x = {name: torch.randn(2, 4, 64, 64).half() for name in places}
        kernel.launched.clear()
        forward.run_forward(problem, Inputs(*(x[name] for name in places)))
        given = [arg.base.data_ptr() for arg in kernel.launched[0] if isinstance(arg, Descriptor)]
        assert given[:3] == [x[name].data_ptr() for name in places]


def test_gradients_that_are_copied_are_not_recorded(recorder: Recorder, kernel: Compiled) -> None:
    problem = Problem.of(batch=2, heads=4, seqlen=64, head_dim=64, dtype="float16", device="cuda")
    for seed in range(3):
        launched, names = call(problem, seed, kernel, broken=True)
        assert len(launched) == 4
        assert "dout" not in {x for args in named(launched[1:], names) for x in args if isinstance(x, str)}
    assert not any(recording._templates for key, recording in recorder._recordings.items() if "backward" in str(key))


def test_statistics_of_some_rows_of_many_are_read_in_place(recorder: Recorder, kernel: Compiled) -> None:
    """A rank's queries of a stage lie within more: the kernel is told how far its heads lie apart."""
    problem = Problem.of(batch=2, heads=4, seqlen=64, head_dim=64, dtype="float16", device="cuda")
    for part in (False, True, True, False):
        launched, names = call(problem, 0, kernel, part=part)
        found = [args for args in named(launched[1:], names) if "lse" in args]
        assert found and all(((4 * 128, 128) in pairwise(args)) is part for args in found)


@pytest.mark.parametrize("stats", [("max_logit",), ("entropy",), ("max_logit", "entropy")], ids=" ".join)
def test_statistics_are_written_to_what_is_returned(recorder: Recorder, kernel: Compiled, stats: tuple[str, ...]) -> None:
    sizes = {"batch": 2, "heads": 4, "seqlen": 64, "head_dim": 64}
    problem = replace(Problem.of(**sizes, dtype="float16", device="cuda"), stats=stats)
    for seed in range(3):  # recorded, then repeated
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, 4, 64, 64).half() for _ in range(3))
        kernel.launched.clear()
        out, lse, found = forward.run_statistics(problem, Inputs(q, k, v))
        given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in flat(kernel.launched[0])]
        written = {name: x for name, x in found._asdict().items() if x is not None}
        assert set(written) - {"key_lse"} == set(stats)
        assert all(x.data_ptr() in given for x in (out, lse, *written.values()))
