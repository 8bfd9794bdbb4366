"""`python -m tools.host_times`: every mask and feature has its row, in a table or as JSON."""

from __future__ import annotations

import json

import pytest
import torch
from tools import host_times


def test_every_call_is_timed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_times, "ROUNDS", 2)
    host_times.main(["--device", "cpu", "--calls", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [one["call"] for one in found] == [*host_times.variants(torch.device("cpu")), "packed", "SDPA"]
    assert all(min(one["forward"], one["backward"], one["both"]) > 0 for one in found)


def test_the_table_names_what_it_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = host_times.HostTime("plain", 31.2, 80.0, 120.7)
    monkeypatch.setattr(host_times, "host_times", lambda device, calls: [row])
    host_times.main(["--device", "cpu"])
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["µs", "forward", "backward", "both"] and line.split() == ["plain", "31", "80", "121"]


def test_a_round_has_calls() -> None:
    with pytest.raises(SystemExit):
        host_times.main(["--calls", "0"])
