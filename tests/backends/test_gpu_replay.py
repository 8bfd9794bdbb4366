"""Recorded launches: the arguments of a later call differ from the first one's in the addresses alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.backends.base import BackwardInputs, Inputs
from tilewise.backends.gpu import replay
from tilewise.backends.gpu.launch import Descriptor
from tilewise.masks import causal
from tilewise.model import TilePlan
from tilewise.problem import Problem

pytest.importorskip("triton")

from tilewise.backends.triton import run

TILES = tuple(TilePlan(32, 32, pass_=name) for name in ("forward", "backward_dkdv", "backward_dq"))
TRIAL = run.Trial(TILES, maps=False)


def collect(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple[Any, ...], list[replay.Launch]]]:
    """Every (key, moving tensors, launches) that a call would perform, none of which is run."""
    found: list[Any] = []
    monkeypatch.setattr(run, "fitting", lambda problem, pass_, build, tile, device: build(tile))
    monkeypatch.setattr(run, "perform", lambda problem, key, moving, build: found.append((key, moving, build())))
    return found


def call(seqlen: int = 64, heads: int = 2, dtype: str = "float16") -> None:
    problem = Problem.of(batch=2, heads=heads, seqlen=seqlen, head_dim=16, dtype=dtype, mask=causal())
    q, k, v, out, dout = (torch.randn(2, heads, seqlen, 16).to(getattr(torch, dtype)) for _ in range(5))
    lse = torch.randn(2, heads, seqlen)
    run.run_forward(problem, Inputs(q, k, v), out, lse, TRIAL)
    run.run_backward(problem, Inputs(q, k, v), BackwardInputs(out, lse, dout), TRIAL)


def plain(launch: replay.Launch) -> tuple[Any, ...]:
    """Arguments as a launcher takes them: addresses for tensors, tuples for structs."""

    def bare(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(bare(part) for part in value)
        return value.data_ptr() if isinstance(value, torch.Tensor) else value

    return (*bare(launch.args), launch.config)


class Compiled:
    """Stands for a kernel: remembers what it was launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.run = lambda *args: self.launched.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launched.append((*grid, *args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """All launches go to it, on stream 7."""
    compiled = Compiled()
    monkeypatch.setattr(replay.Launch, "compiled", lambda self: compiled)
    monkeypatch.setattr(replay, "interpreting", lambda: False)
    monkeypatch.setattr(replay, "current_stream", lambda device: 7)
    monkeypatch.setattr(replay, "_known", {})
    monkeypatch.setattr(replay, "_recent", {})
    return compiled


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_recorded_call_has_the_arguments_of_the_next_call(
    monkeypatch: pytest.MonkeyPatch, kernel: Compiled, dtype: str
) -> None:
    found = collect(monkeypatch)
    call(dtype=dtype)
    call(dtype=dtype)
    half = len(found) // 2
    lengths = [4, 7] if dtype == "float32" else [1, 3]  # q, k, v and dO are split first
    assert half == 2 and [len(launches) for _, _, launches in found] == lengths * 2
    for (key, moving, first), (other_key, other, second) in zip(found[:half], found[half:], strict=True):
        assert key == other_key and hash(key) == hash(other_key)
        kernel.launched.clear()
        assert replay.Recorded(first, moving)(other)
        assert kernel.launched == [
            (after.programs, 1, 1, 7, "function", "metadata", None, None, None, *plain(after)) for after in second
        ]
        assert [launch.options for launch in first] == [launch.options for launch in second]


def test_a_call_is_recorded_at_its_second_coming_and_repeated_from_then_on(kernel: Compiled) -> None:
    problem = Problem.of(heads=1, seqlen=64, head_dim=16, dtype="float16")
    built: list[int] = []

    def perform(x: torch.Tensor, problem: Problem = problem) -> None:
        def build() -> list[replay.Launch]:
            built.append(1)
            return [replay.Launch("kernel", 3, ((x, 5),), run.Config(), run.Options())]

        replay.perform(problem, "key", (x,), build)

    tensors = [torch.zeros(16) for _ in range(4)]
    assert not replay.repeat(problem, "key", (tensors[0],))
    for x in tensors:
        perform(x)
    assert len(built) == 2, "the third call needs no building"
    assert kernel.launched[-1][9] == (tensors[-1].data_ptr(), 5)
    assert replay.repeat(problem, "key", (tensors[0],)) and kernel.launched[-1][9] == (tensors[0].data_ptr(), 5)
    twin = Problem.of(heads=1, seqlen=64, head_dim=16, dtype="float16")
    assert not replay.repeat(twin, "key", (tensors[0],)), "equal, but not the one that came before"
    perform(tensors[0], twin)
    assert len(built) == 2, "an equal problem finds what is recorded"
    assert not replay.repeat(problem, "other", (tensors[0],))


def test_addresses_that_are_no_multiples_of_16_are_built_anew(kernel: Compiled) -> None:
    problem = Problem.of(heads=1, seqlen=64, head_dim=16, dtype="float16")
    x = torch.zeros(32)
    odd = x[1:]
    assert odd.data_ptr() % 16
    built: list[int] = []

    def build() -> list[replay.Launch]:
        built.append(1)
        return [replay.Launch("kernel", 3, ((x, 5),), run.Config(), run.Options())]

    for _ in range(3):
        replay.perform(problem, "key", (x,), build)
    before = len(built)
    assert not replay.repeat(problem, "key", (odd,))
    replay.perform(problem, "key", (odd,), build)
    assert len(built) == before + 1
    assert replay.repeat(problem, "key", (x,)), "what was recorded stays"


def test_other_shapes_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    found = collect(monkeypatch)
    call()
    call(seqlen=96)
    call(heads=4)
    assert len({key for key, _, _ in found}) == len(found)


def test_masks_that_bring_tensors_are_never_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise import masks

    found = collect(monkeypatch)
    ids = torch.zeros(2, 64, dtype=torch.int32)
    problem = Problem.of(batch=2, heads=2, seqlen=64, head_dim=16, dtype="float16", mask=masks.documents(ids))
    q, k, v, out = (torch.randn(2, 2, 64, 16).half() for _ in range(4))
    run.run_forward(problem, Inputs(q, k, v), out, torch.empty(2, 2, 64), TRIAL)
    assert found[0][0] is None


def test_a_descriptor_moves_to_other_memory() -> None:
    x = torch.zeros(2, 2, 64, 16, dtype=torch.float16)
    descriptor = Descriptor(x, 32, 16)
    moved = descriptor.at(4096)
    assert moved.base.data_ptr() == 4096 and descriptor.base is x
    for name in ("shape", "strides", "block_shape", "padding", "round_f32_to_tf32"):
        assert getattr(moved, name) == getattr(descriptor, name)
