"""`python -m tools.host_times`: every mask and feature has its row, in a table or as JSON."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tools import host_times


def test_every_call_is_timed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_times, "ROUNDS", 2)
    monkeypatch.setattr(host_times, "WARM", 1)
    host_times.main(["--device", "cpu", "--calls", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    cached = ["decode", "append, decode"]
    assert [one["call"] for one in found] == [*host_times.variants(torch.device("cpu")), "packed", "SDPA", *cached]
    for one in found:
        assert one["forward"] > 0
        for way in ("backward", "both", "one_thread"):
            assert one[way] is None if one["call"] in cached else one[way] > 0


def test_only_the_calls_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_times, "ROUNDS", 2)
    monkeypatch.setattr(host_times, "WARM", 1)
    host_times.main(["--device", "cpu", "--calls", "1", "--json", "--call", "packed", "--call", "plain"])
    assert [one["call"] for one in json.loads(capsys.readouterr().out)] == ["packed", "plain"]
    with pytest.raises(SystemExit):
        host_times.main(["--device", "cpu", "--call", "biased"])
    assert "--call: got 'biased', need one of plain, causal" in capsys.readouterr().err


def test_the_table_names_what_it_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = host_times.HostTime("plain", 31.2, 80.0, 120.7, 110.4, 0.25)
    cached = host_times.HostTime("decode", 31.2, None, None, None, 0.0)
    monkeypatch.setattr(host_times, "host_times", lambda device, calls, names: iter([row, cached]))
    host_times.main(["--device", "cpu"])
    head, line, decode = capsys.readouterr().out.splitlines()
    assert head.split() == ["µs", "forward", "backward", "both", "one", "thread", "bound"]
    assert line.split() == ["plain", "31", "80", "121", "110", "0.25"]
    assert decode.split() == ["decode", "31", "–", "–", "–", "0.00"] and len(decode) == len(line) == len(head)


def test_a_profile_names_functions_and_bindings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(host_times, "ROUNDS", 2)
    host_times.main(["--without-gpu", "--calls", "3", "--profile", "bias"])
    text = capsys.readouterr().out
    assert "forward: " in text and "both: " in text and text.count("launches bound anew in a call") == 2
    assert "run_backward" in text and "hopper/launch.py" in text
    host_times.main(["--without-gpu", "--calls", "3", "--profile", "decode"])
    text = capsys.readouterr().out
    assert "forward: " in text and "\nboth: " not in text and "triton/paged.py" in text
    with pytest.raises(SystemExit):
        host_times.main(["--device", "cpu", "--profile", "biased"])
    assert "need one of plain, causal" in capsys.readouterr().err


def test_a_round_has_calls() -> None:
    with pytest.raises(SystemExit):
        host_times.main(["--calls", "0"])


def test_nothing_is_timed_before_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is made in every way, then what is compiled in the background is waited for, and then calls are timed."""
    steps: list[str] = []
    q = torch.ones(2)

    def call(name: str) -> Any:
        return lambda *inputs: steps.append(f"{name} {'with' if inputs[0].requires_grad else 'without'}") or inputs[0] * 1

    def measured(name: str, ways: host_times.Ways, *_: Any) -> str:
        steps.append(f"timed {name}")
        return name

    monkeypatch.setattr(host_times, "calls_of", lambda device: {name: (call(name), [q]) for name in "ab"})
    monkeypatch.setattr(host_times, "finish_compiling", lambda: steps.append("compiled"))
    monkeypatch.setattr(host_times, "measured", measured)
    found = host_times.host_times(torch.device("cpu"), 1, ["a", "b"])
    assert isinstance(found, Iterator) and next(found) == "a" and steps[-1] == "timed a", "each row as soon as it is there"
    assert list(found) == ["b"]
    before = steps[: steps.index("compiled")]
    assert {"a with", "a without", "b with", "b without"} == set(before)
    assert steps[len(before) + 1 :] == ["timed a", "timed b"]


def test_no_garbage_is_collected_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(host_times, "least", lambda *_: seen.append(gc.isenabled()) or 1.0)
    ways = host_times.Ways(lambda q: q * 1, [torch.ones(2)])
    host_times.measured("a", ways, 1, torch.device("cpu"))
    assert seen == [False] * 4 and gc.isenabled()
    with pytest.raises(KeyError), host_times.without_garbage():
        raise KeyError
    assert gc.isenabled()


def test_compiling_in_the_background_is_waited_for() -> None:
    from tilewise.backends.gpu.compiled import Kernels, finish_compiling

    finish_compiling()  # nothing to wait for
    go, made, kernels = threading.Event(), [], Kernels("triton")

    def make(i: int) -> None:
        assert go.wait(20)
        made.append(i)

    for i in range(3):
        kernels.ahead(i, lambda i=i: make(i))
    threading.Timer(0.05, go.set).start()
    finish_compiling()
    assert made == [0, 1, 2]
