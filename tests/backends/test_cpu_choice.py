"""Which calls the CPU backends take, and what they say about the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tilewise import dispatch
from tilewise.backends.aten import backend as aten
from tilewise.backends.base import Inputs
from tilewise.backends.cpu import backend as cpu
from tilewise.backends.cpu.prepare import launch_for
from tilewise.errors import BackendError
from tilewise.hardware.probe import probe_cpu
from tilewise.hardware.spec import MATRIX_UNITS
from tilewise.problem import Problem


@pytest.fixture
def without_llvmlite(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "find_spec", lambda name: None)
    cpu._obstacle.cache_clear()
    yield
    cpu._obstacle.cache_clear()


def test_without_llvmlite_tiled_takes_over_and_the_reason_is_given(without_llvmlite: None) -> None:
    problem = Problem.of(heads=2, head_dim=16, seqlen=32, dtype="float32", mask=tw.window(5))
    selection = dispatch.select(problem)
    assert selection.backend.name == "tiled"
    assert "pip install llvmlite" in selection.verdicts["cpu"].reasons[0]


@pytest.mark.parametrize("structure", ["full", "causal"])
def test_fp32_goes_to_the_cpu_backend(structure: str) -> None:
    pytest.importorskip("llvmlite")
    problem = Problem.of(heads=2, head_dim=16, seqlen=32, dtype="float32", mask=getattr(tw, structure)())
    selection = dispatch.select(problem)
    assert selection.backend.name == "cpu"
    assert selection.verdicts["aten"].reasons, "torch's kernel could serve it, so the choice needs a reason"


def test_half_precision_goes_where_products_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, not assumed: where torch can use matrix units and the cpu backend cannot, torch's kernel wins."""
    pytest.importorskip("llvmlite")
    problem = Problem.of(heads=2, head_dim=64, seqlen=512, dtype="bfloat16", needs_lse=False)
    monkeypatch.setattr(aten.plan, "_half_obstacle", lambda dtype, spec: None)
    monkeypatch.setattr(aten, "probe_cpu", lambda: replace(probe_cpu(), isa_flags=("avx512_bf16",)))
    monkeypatch.setattr(aten, "half_gain", lambda dtype: 6.0)
    assert dispatch.select(problem).backend.name == "aten"
    monkeypatch.setattr(aten, "half_gain", lambda dtype: 0.4)
    selection = dispatch.select(problem)
    assert selection.backend.name == "cpu"
    assert "0.40 times" in selection.verdicts["aten"].reasons[0]


def test_tiles_of_our_own_come_before_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    problem = Problem.of(heads=2, head_dim=64, seqlen=512, dtype="bfloat16", needs_lse=False)
    monkeypatch.setattr(aten.plan, "_half_obstacle", lambda dtype, spec: None)
    monkeypatch.setattr(aten, "half_gain", lambda dtype: 6.0)
    monkeypatch.setattr(aten, "probe_cpu", lambda: replace(probe_cpu(), isa_flags=MATRIX_UNITS["amx"]))
    selection = dispatch.select(problem)
    assert selection.backend.name == "cpu"
    assert "AMX" in selection.verdicts["aten"].reasons[0]
    monkeypatch.setattr(aten, "find_spec", lambda name: None)  # without llvmlite there are no kernels to use them
    assert dispatch.select(problem).backend.name == "aten"
    assert dispatch.select(replace(problem, dtype="float16")).backend.name == "aten", "tiles are bf16's"


@pytest.mark.parametrize(
    "features",
    [{"softcap": 5.0}, {"mask": tw.window(9)}, {"head_dim_v": 8}, {"scale": -1.0}, {"kv_seqlen": 40, "mask": tw.causal()}],
    ids=["softcap", "window", "value dim", "scale", "rectangular causal"],
)
def test_aten_names_what_torchs_kernel_lacks(features: dict[str, object]) -> None:
    problem = Problem.of(heads=2, head_dim=16, seqlen=32, dtype="float32", **features)  # type: ignore[arg-type]
    verdict = aten.backend.supports(problem)
    assert not verdict.ok and "torch's kernel" in verdict.reasons[0]


def test_one_query_takes_the_decode_kernel() -> None:
    pytest.importorskip("llvmlite")
    q, k = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 100, 32)
    for mask, kind in ((tw.window(7), "decode"), (tw.dense(torch.ones(1, 100, dtype=torch.bool)), "forward")):
        problem = Problem.of(heads=4, kv_heads=2, seqlen=1, kv_seqlen=100, head_dim=32, dtype="float32", mask=mask)
        assert launch_for(problem, Inputs(q, k, k), "forward").kernel.kind == kind


def test_a_mask_of_more_tensors_than_arguments_goes_to_tiled() -> None:
    """32 terms of five documents each: 320 tensors, with their strides."""
    pytest.importorskip("llvmlite")
    ids = [torch.randint(0, 3, (20,), generator=torch.Generator().manual_seed(n)) for n in range(5)]
    term = tw.documents(ids[0])
    for n in range(1, 5):
        term = term & tw.documents(ids[n])
    mask = term
    for n in range(1, 32):
        mask = mask | (term & tw.prefix(n))
    q, k, v = (torch.randn(1, 1, 20, 16) for _ in range(3))
    out = tw.attention(q, k, v, mask=mask)
    assert torch.equal(out, tw.attention(q, k, v, mask=mask, backend="tiled"))
    with pytest.raises(BackendError, match=r"arguments, more than \d+; write it with fewer terms"):
        tw.attention(q, k, v, mask=mask, backend="cpu")
