"""`python -m tools.derivative_times`: each contender has its row, and is compared with what does the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools import derivative_times


def test_every_contender_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    sizes = ["--heads", "1", "--length", "64", "--second-length", "32", "--dims", "16", "--seconds", "0.01"]
    derivative_times.main(["--device", "cpu", "--dtype", "float32", *sizes, "--json", str(file)])
    rows = json.loads(file.read_text())
    groups = {row["group"] for row in rows}
    assert groups == {f"d16 {mask} {kind}" for mask in ("full", "causal") for kind in ("statistics", "JVP", "second")}
    for kind, names in {"JVP": {"forward", "JVP"}, "statistics": {"forward", "max_logit", "entropy"}}.items():
        of_one = {row["contender"]: row for row in rows if row["group"] == f"d16 full {kind}"}
        assert names <= set(of_one)
        assert of_one["forward"]["speed"][1] == 1
    second = [row["contender"] for row in rows if row["group"] == "d16 full second"]
    assert second == ["SDPA math", "SDPA math, all passes", "tilewise", "tilewise, all passes"]
    assert capsys.readouterr().out.count("d16 full second") == 4


def test_one_kind_alone(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--heads", "1", "--length", "64", "--dims", "16", "--seconds", "0.01"]
    derivative_times.main(["--device", "cpu", "--dtype", "float32", *sizes, "--kinds", "statistics"])
    text = capsys.readouterr().out
    assert "entropy" in text and "JVP" not in text and "second" not in text


def test_alone_is_compared_with_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"a": [2.0] * 5, "a, all": [8.0] * 5, "b": [1.0] * 5, "b, all": [2.0] * 5}
    monkeypatch.setattr(derivative_times, "interleave", lambda timers, effort: taken)
    rows = derivative_times.timed("group", iter([(name, lambda: None) for name in taken]), "cpu", 1.0)
    assert {row.contender: row.speed.p50 for row in rows} == {"a": 1, "a, all": 1, "b": 2, "b, all": 4}
