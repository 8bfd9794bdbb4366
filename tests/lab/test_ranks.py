"""The rate that ranks keep: what is timed is what they compute, and a wrong result has no speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tools import ranks

from tilewise.distributed.segments import Call
from tilewise.problem import Problem


def problem(mask: Any) -> Problem:
    return Problem.of(heads=2, seqlen=128, head_dim=16, dtype="float32", mask=mask, needs_grad=True, needs_lse=False)


def test_rates_of_each_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    shape = "--length 128 --query-heads 2 --kv-heads 2 --dim 16 --ranks 4 --rounds 2 --device cpu --dtype float32"
    ranks.main([*shape.split(), "--json", str(file)])
    rows = json.loads(file.read_text())
    assert len(rows) == 2 * len(ranks.masks(128, "cpu")) == len(capsys.readouterr().out.splitlines()) - 2
    for row in rows:
        assert 0 < row["kernels"] < row["passes"] and row["slowest"] < row["passes"]
        assert row["rate"] == row["single"] / row["kernels"]


def test_every_call_of_the_ranks_is_timed() -> None:
    mask = ranks.masks(128, "cpu")["causal"]
    forward, backward = ranks.measure(problem(mask), 4, "cpu", rounds=1)
    plan = ranks.plan(problem(mask), ranks=4, device="h200", heads=1)
    own = sum(len(stage.works_of(rank)) > 0 for stage in plan.stages[:1] for rank in range(4))
    assert own < forward.calls == backward.calls


def test_a_wrong_result_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = ranks.masks(128, "cpu")["causal"]
    right = Call.forward

    def wrong(self: Call, *args: Any) -> Any:
        out, lse = right(self, *args)
        return 1.01 * out, lse

    monkeypatch.setattr(Call, "forward", wrong)
    with pytest.raises(ranks.WrongResultError, match="off the single call's"):
        ranks.measure(problem(mask), 4, "cpu", rounds=1)


def test_calls_are_listed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--length 8192 --query-heads 2 --kv-heads 2 --dim 64 --ranks 4"
    ranks.main(["--calls", *shape.split(), "--masks", "causal"])
    _, stages, _, *calls, total = capsys.readouterr().out.splitlines()
    assert stages.startswith("causal: ") and total.startswith(f"{len(calls)} calls; predicted")
    assert {line.split()[0] for line in calls} == {"0", "1", "2", "3"} and all("hopper" in line for line in calls)


@pytest.mark.parametrize(
    ("mask", "calls", "rates"), [("documents", 16, (0.94, 0.92)), ("window", 15, (0.94, 0.94)), ("wide window", 23, (0.96, 0.94))]
)
def test_ranks_keep_so_much_of_the_rate(
    mask: str, calls: int, rates: tuple[float, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """As predicted for eight H200s, forward and backward, in so many calls."""
    ranks.main(["--calls", "--masks", mask])
    found = capsys.readouterr().out.splitlines()[-1]
    kept = [float(rate) for rate in found.partition("rate ")[2].split(", ")]
    assert int(found.split()[0]) <= calls
    assert all(rate >= least for rate, least in zip(kept, rates, strict=True)), found


def test_a_profile_names_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--length 128 --query-heads 2 --kv-heads 2 --dim 16 --ranks 4 --rounds 2 --device cpu --dtype float32"
    ranks.main([*shape.split(), "--profile", "1", "--masks", "window"])
    _, rank, header, *rows = capsys.readouterr().out.splitlines()
    assert rank == "window, rank 1:" and header.split() == ["µs", "count", "name"]
    assert rows.index("window, one call:") > 3
    times = [float(row.split()[0]) for row in rows[: rows.index("window, one call:")]]
    assert times == sorted(times, reverse=True)
    with pytest.raises(SystemExit):
        ranks.main([*shape.split(), "--profile", "4"])


def test_what_calls_put_on_a_device_is_found_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels alone, as of a single call: no copies, fills or conversions."""
    pytest.importorskip("triton")
    from tools import rank_operations

    shape = "--length 8192 --query-heads 2 --kv-heads 2 --dim 64 --ranks 4"
    rank_operations.main([*shape.split(), "--masks", "window", "documents"])
    lines = capsys.readouterr().out.splitlines()
    found = {line for line in lines if not line.startswith(" ")}
    kernels = ("forward: forward_kernel", "backward: preprocess_kernel, keys_kernel, postprocess_kernel")
    assert found == {f"{mask} {one}" for mask in ("window", "documents") for one in kernels}
    assert sum("one call" in line for line in lines) == 4 and sum("rank 3: " in line for line in lines) >= 4
