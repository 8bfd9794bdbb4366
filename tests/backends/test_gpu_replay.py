"""Prepared launches: the arguments of a later call differ from the first one's in the addresses alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.backends.base import Inputs, Needs
from tilewise.backends.gpu import replay
from tilewise.backends.gpu.launch import Descriptor
from tilewise.masks import causal
from tilewise.planner import TilePlan
from tilewise.problem import Problem

pytest.importorskip("triton")

from tilewise.backends.triton import run

TILES = tuple(TilePlan(32, 32, pass_=name) for name in ("forward", "backward_dkdv", "backward_dq"))
TRIAL = run.Trial(TILES, maps=False)


def collect(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple[Any, ...], list[replay.Launch]]]:
    """Every (key, moving tensors, launches) that a call would perform, none of which is run."""
    found: list[Any] = []
    monkeypatch.setattr(run, "fitting", lambda problem, pass_, build, tile, device: build(tile))
    monkeypatch.setattr(run, "perform", lambda key, moving, build: found.append((key, moving, build())))
    return found


def call(seqlen: int = 64, heads: int = 2) -> None:
    problem = Problem.of(batch=2, heads=heads, seqlen=seqlen, head_dim=16, dtype="float16", mask=causal())
    q, k, v, out, dout = (torch.randn(2, heads, seqlen, 16).half() for _ in range(5))
    lse = torch.randn(2, heads, seqlen)
    run.run_forward(problem, Inputs(q, k, v), out, lse, TRIAL)
    run.run_backward(problem, Inputs(q, k, v), run.Saved(out, lse, dout, None), Needs(), TRIAL)


def plain(value: Any, config: Any) -> Any:
    """Arguments as a launcher takes them: addresses for tensors, tuples for structs."""
    if isinstance(value, tuple) and value is not config:
        return tuple(plain(part, config) for part in value)
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def test_a_prepared_expression_gives_the_arguments_of_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    found = collect(monkeypatch)
    call()
    call()
    half = len(found) // 2
    assert half == 2 and [len(launches) for _, _, launches in found] == [1, 3, 1, 3]
    for (key, moving, first), (other_key, other, second) in zip(found[:half], found[half:], strict=True):
        assert key == other_key and hash(key) == hash(other_key)
        addresses = [0 if x is None else x.data_ptr() for x in other]
        for before, after in zip(first, second, strict=True):
            fill, _ = replay.filler((*before.args, before.config), moving)
            assert fill(addresses) == plain((*after.args, after.config), after.config)
            assert (before.programs, before.options) == (after.programs, after.options)


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
