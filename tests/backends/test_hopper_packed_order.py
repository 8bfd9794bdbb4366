"""The kept order of a packed batch: written once for all layers that share lengths, and anew whenever they may have changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tests.backends.test_gpu_hopper_launch import recorder
from tests.backends.test_gpu_record import Compiled, kernel
from tilewise.backends.base import BackwardInputs, Inputs
from tilewise.backends.gpu import record
from tilewise.backends.gpu.record import Recorder
from tilewise.backends.hopper import launch as forward
from tilewise.backends.hopper.arguments import make_plan
from tilewise.backends.hopper.backward import launch as backward
from tilewise.backends.hopper.packed_order import Lengths, OrderConfig, packed_order
from tilewise.hardware import lookup
from tilewise.problem import Problem

__all__ = ["kernel", "recorder"]


def packed() -> Problem:
    return Problem.of(
        batch=2, heads=4, seqlen=600, head_dim=64, dtype="float16", mask=tw.causal(), varlen=True, device="cuda"
    )


def ends(*cu: int) -> torch.Tensor:
    return torch.tensor(cu, dtype=torch.int32)


def layer(problem: Problem, cu: torch.Tensor, kernel: Compiled) -> tuple[list[int], list[int]]:
    """The orders that the kernels of a forward and a backward write, and those that they read."""
    q, k, v, dout = (torch.zeros(1, 4, 600, 64).half() for _ in range(4))
    kernel.launched.clear()
    inputs = Inputs(q, k, v, cu_q=cu, cu_k=cu)
    out, lse = forward.run_forward(problem, inputs)
    backward.run_backward(problem, inputs, BackwardInputs(out, lse, dout, torch.zeros_like(lse)))
    written, read = [], []
    for args in kernel.launched:
        if isinstance(args[-1], OrderConfig):
            a = args[-2]
            written.append(address(a[0]))
            assert [address(x) for x in a[1:4]] == [cu.data_ptr()] * 3, "of its own lengths"
        elif args[-1].ORDERED:
            read.append(address(args[-2][ORDER]))
    return written, read


ORDER = make_plan(packed(), lookup("h200"), lambda *_: None).arguments._fields.index("order")


def address(x: Any) -> int:
    return x if isinstance(x, int) else int(x.data_ptr())


def test_layers_share_an_order(recorder: Recorder, kernel: Compiled) -> None:
    problem, cu = packed(), ends(0, 100, 600)
    written, read = layer(problem, cu, kernel)
    assert len(written) == 2 and read == written
    for _ in range(3):
        assert layer(problem, cu, kernel) == ([], read)


def changed_in_place(cu: torch.Tensor) -> torch.Tensor:
    cu[1] = 300
    return cu


CHANGES = {
    "changed in place": changed_in_place,
    "copied over": lambda cu: cu.copy_(ends(0, 7, 600)),
    "another tensor of the same lengths": torch.clone,
    "another tensor": lambda cu: ends(0, 599, 600),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_lengths_have_their_own_order(recorder: Recorder, kernel: Compiled, change: str) -> None:
    problem, cu = packed(), ends(0, 100, 600)
    for _ in range(3):  # all is recorded
        layer(problem, cu, kernel)
    other = CHANGES[change](cu)
    written, read = layer(problem, other, kernel)
    assert len(written) == 2 and read == written
    assert layer(problem, other, kernel) == ([], read)
    if other is not cu:
        again, back = layer(problem, cu, kernel)
        assert again == back and len(again) == 2


def test_lengths_at_the_address_of_others_have_their_own_order(recorder: Recorder, kernel: Compiled) -> None:
    """A later tensor in the same memory has the same address and version."""
    problem, memory = packed(), ends(0, 100, 600)
    first = torch.from_numpy(memory.numpy())
    layer(problem, first, kernel)
    assert layer(problem, first, kernel)[0] == []
    del first
    memory[1] = 400
    second = torch.from_numpy(memory.numpy())
    assert len(layer(problem, second, kernel)[0]) == 2


def test_lengths_without_versions_are_ordered_in_every_call(recorder: Recorder, kernel: Compiled) -> None:
    with torch.inference_mode():
        cu = ends(0, 100, 600)
    problem = packed()
    for _ in range(3):
        written, read = layer(problem, cu, kernel)
        assert len(written) == 2 and read == written


class Device:
    """A tensor's place on a GPU with streams, one of which may be captured."""

    def __init__(self, kernel: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel, self.stream, self.capturing = kernel, 7, False
        monkeypatch.setattr(record, "current_stream", lambda index: self.stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.q: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
        self.problem = packed()
        plan = make_plan(self.problem, lookup("h200"), lambda *_: None)
        self.config, self.arguments = plan.config, plan.arguments

    def order(self, cu: torch.Tensor) -> torch.Tensor:
        return packed_order(self.problem, self.q, Lengths(cu, cu), self.config, self.arguments, False, lambda: 1).order

    @property
    def writes(self) -> int:
        return len(self.kernel.launched)


def test_each_stream_has_its_own_order(recorder: Recorder, kernel: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    device, cu = Device(kernel, monkeypatch), ends(0, 100, 600)
    first = device.order(cu)
    device.stream = 8
    second = device.order(cu)
    assert second is not first and device.writes == 2, "another stream does not wait for the first"
    assert device.order(cu) is second
    device.stream = 7
    assert device.order(cu) is first and device.writes == 2


def test_a_captured_graph_orders_anew(recorder: Recorder, kernel: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    device, cu = Device(kernel, monkeypatch), ends(0, 100, 600)
    eager = device.order(cu)
    device.capturing = True
    captured = [device.order(cu) for _ in range(2)]
    assert device.writes == 3 and len({id(x) for x in (eager, *captured)}) == 3
    device.capturing = False
    assert device.order(cu) is eager and device.writes == 3, "nor is an order of a graph taken by later calls"
