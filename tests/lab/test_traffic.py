"""verify-traffic: what ncu writes is understood, put beside the model, and judged; without ncu it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise import hardware, model
from tilewise.cli import app
from tilewise.errors import ArgumentError, DeviceError
from tilewise.lab.report import counters, verify
from tilewise.lab.report.counters import DRAM_READ, L2_LOOKUP, L2_READ, TrafficCase, compare, launches
from tilewise.model import TilePlan

CASE = TrafficCase(seqlen=4096, mask="causal")
TILES = {
    "forward": TilePlan(128, 128),
    "backward_dkdv": TilePlan(64, 128, pass_="backward_dkdv"),
    "backward_dq": TilePlan(128, 64, pass_="backward_dq"),
}
SPEC = hardware.lookup("h200")


def written(factor: dict[str, float] | None = None) -> str:
    """What ncu prints for our kernels if the hardware moves the predicted bytes times a factor."""
    lines = [
        "==PROF== Connected to process 4242 (/usr/bin/python3.11)",
        '==PROF== Profiling "forward_kernel": 0%....50%....100% - 2 passes',
        "a line of the program's own",
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
        f'"{DRAM_READ}","{L2_READ}","{L2_LOOKUP}"',
        '"","","","","","","","","","","","byte","byte","sector"',
    ]
    names = {"forward_kernel": "forward", "keys_kernel": "backward_dkdv", "queries_kernel": "backward_dq"}
    for number, (name, pass_) in enumerate(names.items()):
        bytes_ = counters.predict(CASE.problem(), pass_, TILES[pass_], SPEC)
        share = (factor or {}).get(name, 1.0)
        dram, given = round(bytes_["DRAM reads"] * share), round(bytes_["L2 to SMs"] * share)
        lines.append(
            f'"{number}","4242","python3.11","127.0.0.1","{name}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",'
            f'"{dram:,}","{given:,}","{given // 64:,}"'
        )
    lines.append(
        '"9","4242","python3.11","127.0.0.1","void at::native::fill","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","1","1","1"'
    )
    return "\n".join(lines)


def test_launches_are_read_by_kernel() -> None:
    found = dict(launches(written()))
    assert list(found) == ["forward_kernel", "keys_kernel", "queries_kernel", "void at::native::fill"]
    moved = model.v2(CASE.problem(), TILES["forward"]).total_read
    assert found["forward_kernel"][L2_READ] == moved


def test_equal_bytes_pass_and_others_do_not() -> None:
    assert all(kernel.ok for kernel in compare(CASE, TILES, launches(written()), SPEC))
    off = compare(CASE, TILES, launches(written({"keys_kernel": 1.07})), SPEC)
    assert [kernel.ok for kernel in off] == [True, False, True]
    l2, dram = off[1].levels
    assert (l2.ok, dram.ok) == (False, True)  # 7 % is beyond 5, within 10
    assert l2.off == pytest.approx(0.07, abs=1e-3)
    assert off[1].looked_up == pytest.approx(l2.measured / 2, rel=1e-3)  # one lookup for two SMs
    assert json.dumps([kernel.to_dict() for kernel in off])


def test_the_model_says_what_each_level_gives() -> None:
    told = counters.predict(CASE.problem(), "forward", TILES["forward"], SPEC)
    assert told["DRAM reads"] < told["L2 to SMs"]
    least = model.compulsory(CASE.problem(), TILES["forward"]).total_read
    assert told["DRAM reads"] == least  # K and V of a head stay in L2


def test_output_that_is_none_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no table"):
        list(launches("==ERROR== nothing"))
    with pytest.raises(ArgumentError, match="no column"):
        list(launches(written().replace(L2_READ, "another")))


def test_without_ncu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify.shutil, "which", lambda name: None)
    monkeypatch.setattr(verify, "USUAL", ())
    with pytest.raises(DeviceError, match="Nsight Compute"):
        verify.find_ncu()
    done = CliRunner().invoke(app.app, ["verify-traffic"])
    assert done.exit_code == 2


def test_the_command_names_kernels_and_metrics(tmp_path: Path) -> None:
    line = verify.command("ncu", CASE, tmp_path / "note.json")
    assert L2_READ in " ".join(line) and "forward_kernel" in " ".join(line)
    assert TrafficCase(**json.loads(line[-2])) == CASE


def test_cases_are_long_enough_and_of_both_kinds() -> None:
    assert all(case.seqlen >= 4096 for case in verify.CASES)
    assert {case.mask for case in verify.CASES} >= {"", "causal"}


def test_one_name_may_do_either_of_two_passes() -> None:
    """A kernel for dK and dV that adds up dQ in memory draws the sums through L2; who ran is told by the tiles."""
    fused = {"forward": TILES["forward"], "backward_fused": TilePlan(64, 128, pass_="backward_dkdv")}
    plain, adding = (compare(CASE, tiles, launches(written()), SPEC)[1] for tiles in (TILES, fused))
    assert adding.levels[0].predicted == plain.levels[0].predicted
    assert adding.levels[1].predicted - plain.levels[1].predicted == 4 * 16 * 4096 * 128
    assert [kernel.name for kernel in compare(CASE, fused, launches(written()), SPEC)] == ["forward_kernel", "keys_kernel"]
