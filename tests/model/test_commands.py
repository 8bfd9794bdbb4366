"""`tilewise plan` and `tilewise simulate`, as they are typed."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tilewise.cli.app import app
from tilewise.hardware import catalogue
from tilewise.lab.simulator import show
from tilewise.lab.simulator.precision import experiment

PLAN = ["plan", "--batch", "1", "--heads", "16", "--seqlen", "4096", "--head-dim", "128", "--device", "h200"]


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "140", "NO_COLOR": "1"}).invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_plan_prints_a_table() -> None:
    text = invoke(*PLAN, "--mask", "causal & window(4096)")
    for word in (
        "128×128",
        "H200",
        "bound by tensor cores",
        "times read",
        "tiles considered",
        "hopper",
        "forward_kernel",
        "keys_kernel",
        "window(4096)",
    ):
        assert word in text, word


def test_plan_json() -> None:
    data = json.loads(invoke(*PLAN, "--json", "--kv-heads", "4", "--kv-seqlen", "8192", "--dtype", "fp16"))
    assert data["problem"]["kv_heads"] == 4 and data["problem"]["seqlen_k"] == 8192
    assert data["tile"]["block_q"] == 128 and data["device"]["key"] == "h200"
    assert (
        data["traffic"]["compulsory"]["total"] <= data["traffic"]["dram"]["total"] <= data["traffic"]["tile"]["total"]
    )


def test_plan_everywhere() -> None:
    text = invoke("plan", "--all-devices", "--dtype", "fp16")
    assert all(key in text for key in catalogue())
    data = json.loads(invoke("plan", "--all-devices", "--json"))
    assert not data["impossible"]
    served = {found["device"]["key"]: found["backend"] for found in data["plans"]}
    assert set(served) == set(catalogue())
    assert (served["h200"], served["a100-80"], served["v100"], served["altra-q80"]) == ("hopper", "triton", "tiled", "cpu")
    assert all((found["seconds"] is None) == (found["backend"] == "tiled") for found in data["plans"])


def test_plan_with_ones_own_tile() -> None:
    text = invoke(*PLAN, "--tile", "128x64")
    assert "128×128, which would have been taken" in " ".join(text.split()) and "(forward, user)" in text
    data = json.loads(invoke(*PLAN, "--backend", "triton", "--pass", "backward_dq", "--tile", "32x32", "--json"))
    assert (data["backend"], data["tile"]["block_q"], data["tile"]["source"]) == ("triton", 32, "user")
    assert list(data["passes"]) == ["forward", "backward_preprocess", "backward_dkdv", "backward_dq"]


def test_plan_on_this_machine() -> None:
    assert "register tile" in invoke("plan", "--device", "cpu", "--dtype", "fp32", "--seqlen", "512")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--device", "h20"], "did you mean 'h200'"),
        (["plan", "--device", "h200", "--mask", "causal & winow(3)"], "position 10"),
        (["plan", "--device", "h200", "--tile", "512x512", "--backend", "hopper"], "hopper has no 512×512 for forward"),
        (["explain", "--device", "a100", "--tile", "96x96", "--backend", "triton"], "triton has no 96×96 for forward"),
        (["explain", "--device", "h200", "--tile", "64x64", "--backend", "reference"], "reference has none to choose"),
        (["plan", "--device", "h200", "--tile", "0x64"], "need two positive integers"),
        (["plan", "--device", "h200", "--backend", "cuda"], "need 'auto' or one of hopper"),
        (["plan", "--device", "h200", "--tile", "big"], "need rows and keys such as 128x64"),
        (["plan", "--device", "h200", "--heads", "3", "--kv-heads", "2"], "must be a multiple"),
        (["simulate", "--schedule", "v7"], "need one of standard"),
        (["simulate", "--sram", "100"], "take a smaller tile"),
        (["simulate", "--tile", "0x32"], "block_q: got 0"),
        (["simulate", "--schedule", "v2:log"], "form: got 'log'"),
        (["simulate", "--seqlen", "100000"], "too many to run literally"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], message: str) -> None:
    text = " ".join(invoke(*arguments, code=2).split())
    assert "error:" in text and message in text
    assert "Traceback" not in text


def test_simulate_shows_counts_walk_and_timeline() -> None:
    text = invoke("simulate", "--schedule", "v1,v2,standard", "--mask", "causal", "--seqlen", "128", "--tile", "32x32")
    for word in (
        "v1 reads",
        "v2 writes",
        "standard reads",
        "the same",
        "tile walk of v1",
        "tile walk of v2",
        "buffer B",
    ):
        assert word in text, word
    assert "other" not in text.split("what it did")[1].split("largest error")[0]
    assert "transposed" in text and "saved" in text


def test_simulate_json() -> None:
    (data,) = json.loads(invoke("simulate", "--json", "--schedule", "backward", "--seqlen", "32", "--tile", "8x8"))
    assert data["agrees"] and data["error"] < 1e-12
    assert data["traffic"] == data["model"]
    assert data["traffic"]["tensors"]["dQ"]["write"] == 32 * 64 * 2


def test_simulate_decode_and_the_other_form() -> None:
    shape = ["--seqlen", "2", "--kv-seqlen", "200", "--heads", "4", "--kv-heads", "2", "--json"]
    parts, other = json.loads(invoke("simulate", "--schedule", "decode,v2:normalised", *shape))
    assert parts["agrees"] and other["agrees"] and parts["traffic"]["tensors"]["partial O"]["write"]
    assert parts["error"] < 1e-13 and other["error"] < 1e-13


def test_both_forms_side_by_side_are_told_apart() -> None:
    text = invoke("simulate", "--schedule", "v1,v1:normalised", "--seqlen", "64", "--tile", "32x32")
    for words in ("v1:normalised reads", "tile walk of v1:normalised", "schedule v1, v1:normalised"):
        assert words in text, words


def test_simulate_precision() -> None:
    out = Console(file=io.StringIO(), width=140)
    out.print(show.precision(experiment(n=64, rows=8, widths=(16, 64))))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "rescalings a row" in text and "fp32 compensated" in text
    data = json.loads(invoke("simulate", "--precision", "--json"))
    assert {row["path"] for row in data} >= {"fp16", "bf16", "fp32", "fp32 compensated", "double accumulators"}


def test_plan_and_explain_predict_the_same() -> None:
    for device in (["--device", "h200"], ["--device", "xeon-8480"], []):
        shape = ["--seqlen", "512", "--heads", "4", "--head-dim", "64", "--dtype", "fp16", "--json", *device]
        plan, explain = (json.loads(invoke(command, *shape)) for command in ("plan", "explain"))
        for fact in ("seconds", "tile", "passes", "limits", "figures_of", "ceilings", "on_chip", "traffic"):
            assert plan[fact] == explain[fact], (device, fact)
        assert plan["backend"] == (explain["backend"] or explain["backend_there"])
