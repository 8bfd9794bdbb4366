"""The simulator's bytes are the model's bytes, its results the exact ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise.masks as masks
from tests.model.strategies import problems, tiles
from tests.model.tutorials import tiling_sram
from tilewise import model
from tilewise.errors import ArgumentError, PlanError
from tilewise.lab.simulator import exact, random_inputs, simulate
from tilewise.masks import TileMap
from tilewise.model import TilePlan
from tilewise.problem import Problem

FORWARD = ("standard", "standard3", "v1", "v2")
SLOW_MACHINE = settings(deadline=None, max_examples=40)


def expected(problem: Problem, tile: TilePlan, schedule: str) -> model.Traffic:
    if schedule.startswith("standard"):
        return model.standard(problem, tile, kernels=3 if schedule == "standard3" else 6)
    return model.traffic(problem, tile, schedule)


def bound(problem: Problem, inputs: dict[str, np.ndarray]) -> float:
    """float64 rounding over one row: the reductions are no longer than D + Sk terms, the values below max |V| or so."""
    terms = problem.head_dim + problem.seqlen_k + 8
    largest = max(float(np.abs(array).max(initial=1.0)) for array in inputs.values())
    return 4 * terms * np.finfo(np.float64).eps * largest * max(1.0, largest * problem.head_dim)


@pytest.mark.parametrize("schedule", FORWARD)
@SLOW_MACHINE
@given(data=st.data())
def test_forward_bytes_and_values(schedule: str, data: st.DataObject) -> None:
    problem, tile = data.draw(problems()), data.draw(tiles())
    form = data.draw(st.sampled_from(["unnormalised", "normalised"]))
    inputs = random_inputs(problem, seed=1)
    run = simulate(problem, tile, schedule, form=form, inputs=inputs)
    assert run.traffic == expected(problem, tile, schedule)
    out, lse = exact.attention(problem, inputs["Q"], inputs["K"], inputs["V"], inputs.get("bias"))
    tolerance = bound(problem, inputs)
    np.testing.assert_allclose(run.outputs["O"], out, rtol=0, atol=tolerance)
    if schedule == "v2":
        np.testing.assert_allclose(run.outputs["LSE"], lse, rtol=0, atol=tolerance)
    if schedule in ("v1", "v2"):
        counts = TileMap(problem.program, problem.shape, tile.block_q, tile.block_k).counts()
        work = model.work(problem, tile)
        assert run.counts.updates == counts.visited == len(run.walk) == work.tiles
        assert run.counts.flops == work.visited
        assert run.counts.rescales <= run.counts.updates


@SLOW_MACHINE
@given(problem=problems(), tile=tiles("decode"))
def test_decode_bytes_and_values(problem: Problem, tile: TilePlan) -> None:
    inputs = random_inputs(problem, seed=2)
    run = simulate(problem, tile, "decode", inputs=inputs)
    assert run.traffic == model.traffic(problem, tile, "decode")
    out, lse = exact.attention(problem, inputs["Q"], inputs["K"], inputs["V"], inputs.get("bias"))
    np.testing.assert_allclose(run.outputs["O"], out, rtol=0, atol=bound(problem, inputs))
    np.testing.assert_allclose(run.outputs["LSE"], lse, rtol=0, atol=bound(problem, inputs))


@pytest.mark.parametrize("schedule", ["backward", "backward_fused"])
@SLOW_MACHINE
@given(problem=problems(gradient=True), tile=tiles())
def test_backward_bytes_and_values(schedule: str, problem: Problem, tile: TilePlan) -> None:
    inputs = random_inputs(problem, seed=3)
    run = simulate(problem, tile, schedule, inputs=inputs)
    assert run.traffic == model.traffic(problem, tile, schedule)
    wanted = exact.gradients(problem, inputs["Q"], inputs["K"], inputs["V"], inputs["dO"])
    # a gradient sums over keys or over the queries of a group, products of three inputs
    tolerance = bound(problem, inputs) * (problem.seqlen_q * problem.group + problem.seqlen_k) * 10
    for name, value in zip(("dQ", "dK", "dV"), wanted, strict=True):
        np.testing.assert_allclose(run.outputs[name], value, rtol=0, atol=tolerance, err_msg=name)


def test_exact_gradients_are_derivatives() -> None:
    """The oracle itself, against central differences."""
    problem = Problem.of(heads=2, kv_heads=1, seqlen=5, kv_seqlen=6, head_dim=3, dtype="float64", mask=masks.causal())
    inputs = random_inputs(problem, seed=4)
    grads = exact.gradients(problem, inputs["Q"], inputs["K"], inputs["V"], inputs["dO"])
    step = 1e-6
    for name, grad in zip("QKV", grads, strict=True):
        index = tuple(size // 2 for size in grad.shape)
        value = []
        for sign in (1, -1):
            moved = {key: array.copy() for key, array in inputs.items()}
            moved[name][index] += sign * step
            out, _ = exact.attention(problem, moved["Q"], moved["K"], moved["V"])
            value.append(float((out * inputs["dO"]).sum()))
        assert grad[index] == pytest.approx((value[0] - value[1]) / (2 * step), rel=1e-6, abs=1e-8)


def test_both_forms_are_equal() -> None:
    problem = Problem.of(heads=2, seqlen=32, head_dim=8, dtype="float64", mask=masks.causal())
    runs = [simulate(problem, TilePlan(8, 4), "v2", form=form) for form in ("unnormalised", "normalised")]
    np.testing.assert_allclose(runs[0].outputs["O"], runs[1].outputs["O"], rtol=0, atol=1e-14)
    assert runs[0].counts == runs[1].counts


def test_on_chip_peak_is_the_formula() -> None:
    """The tutorial on tiling counts Q, K, V, S, O and m, l: with one buffer and fp32 throughout that is the simulator's peak."""
    problem = Problem.of(heads=1, seqlen=64, head_dim=16, dtype="float32")
    run = simulate(problem, TilePlan(16, 32, stages=1), "v2")
    assert run.sram_peak == tiling_sram(16, 32, 16, 4)
    assert simulate(problem, TilePlan(16, 32, stages=2), "v2").sram_peak == run.sram_peak + 2 * 32 * 16 * 4


def test_sram_overflow_raises() -> None:
    problem = Problem.of(heads=1, seqlen=64, head_dim=16, dtype="float32")
    need = tiling_sram(16, 32, 16, 4)
    simulate(problem, TilePlan(16, 32, stages=1), "v2", sram=need)
    with pytest.raises(PlanError, match=rf"{need:,} bytes needed, {need - 1:,} there .*smaller tile"):
        simulate(problem, TilePlan(16, 32, stages=1), "v2", sram=need - 1)


@pytest.mark.parametrize("sram", [1, 96 * 1024, 197_631])
def test_the_error_says_what_the_whole_schedule_needs(sram: int) -> None:
    """128×128, d 64, fp32, one buffer: 193 KiB, however little there is; not what was held when it first overflowed."""
    problem = Problem.of(heads=1, seqlen=256, head_dim=64, dtype="float32")
    need = tiling_sram(128, 128, 64, 4)
    assert need == 197_632
    with pytest.raises(PlanError, match=rf"197,632 bytes needed, {sram:,} there \(Q 32,768, .*, S 65,536\)"):
        simulate(problem, TilePlan(128, 128, stages=1), "v2", sram=sram)
    assert simulate(problem, TilePlan(128, 128, stages=1), "v2", sram=need).sram_peak == need


def test_a_run_is_named_by_its_form() -> None:
    problem = Problem.of(heads=1, seqlen=8, head_dim=2, dtype="float32")
    for schedule in ("v1", "v2", "decode"):
        assert simulate(problem, TilePlan(4, 4), schedule).label == schedule
        other = simulate(problem, TilePlan(4, 4), schedule, form="normalised")
        assert other.label == f"{schedule}:normalised" and other.to_dict()["form"] == "normalised"
    # the standard way divides once, whatever is asked
    assert simulate(problem, TilePlan(4, 4), "standard", form="normalised").label == "standard"


def test_v1_moves_more_than_v2() -> None:
    problem = Problem.of(heads=1, seqlen=128, head_dim=16, dtype="float32")
    tile = TilePlan(32, 32)
    first, second = (simulate(problem, tile, schedule) for schedule in ("v1", "v2"))
    assert first.traffic.total > second.traffic.total
    np.testing.assert_allclose(first.outputs["O"], second.outputs["O"], rtol=0, atol=1e-13)


def test_unwritten_memory_is_poison() -> None:
    """A schedule that forgot a block would leave NaN behind: outputs of rows without keys are written too."""
    problem = Problem.of(heads=1, seqlen=8, kv_seqlen=4, head_dim=2, dtype="float32", mask=masks.causal())
    for schedule in ("v1", "v2", "decode"):
        out = simulate(problem, TilePlan(2, 2), schedule).outputs["O"]
        assert np.isfinite(out).all()
        assert (out[0, 0, :4] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "v3"}, "schedule: got 'v3', need one of standard"),
        ({"form": "log"}, "form: got 'log', need one of unnormalised"),
    ],
)
def test_bad_arguments(change: dict[str, str], message: str) -> None:
    problem = Problem.of(heads=1, seqlen=4, head_dim=2)
    with pytest.raises(PlanError, match=message):
        simulate(problem, TilePlan(2, 2), **change)  # type: ignore[arg-type]


def test_features_it_does_not_run_raise() -> None:
    problem = Problem.of(heads=1, seqlen=4, head_dim=2, dropout_p=0.1)
    with pytest.raises(PlanError, match="dropout_p"):
        simulate(problem, TilePlan(2, 2))
    wrong = random_inputs(Problem.of(heads=1, seqlen=5, head_dim=2))
    with pytest.raises(ArgumentError, match=r"Q: got shape \(1, 1, 5, 2\)"):
        simulate(Problem.of(heads=1, seqlen=4, head_dim=2), TilePlan(2, 2), inputs=wrong)
