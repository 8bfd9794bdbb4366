"""`tilewise plan --ranks`: schedules side by side, by the facts in its JSON; and the events that its picture draws."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tilewise as tw
from tilewise.cli.app import app
from tilewise.cli.plan import parse_lengths, parse_ranks
from tilewise.display import format_seconds
from tilewise.distributed.predict import Prediction
from tilewise.distributed.timeline import events
from tilewise.errors import ArgumentError

WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
LONG = ("plan", "--device", "h200", "--seqlen", "131072", "--heads", "32", "--kv-heads", "8")


def facts(*arguments: str) -> dict[str, Any]:
    done = CliRunner(env=WIDE).invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_window_travels_a_hundredth_of_what_all_gather_sends() -> None:
    found = facts(*LONG, "--mask", "causal & window(1024)", "--ranks", "8")
    (at,) = found["ranks"]
    rows = {row["name"]: row for row in at["schedules"]}
    assert list(rows) == ["ring", "all-gather", "Ulysses", "2-D", "planned"]
    assert rows["planned"]["bytes_forward"] * 100 <= rows["all-gather"]["bytes_forward"]
    assert rows["planned"]["seconds"] < rows["ring"]["seconds"]
    problem = tw.Problem.of(heads=32, kv_heads=8, head_dim=128, seqlen=131072, mask=tw.causal() & tw.window(1024))
    own = tw.distributed.plan(problem, ranks=8, device="h200")
    assert rows["planned"]["bytes_forward"] == max(own.bytes_sent(rank) for rank in range(8))
    assert rows["planned"]["imbalance"] == own.imbalance


def test_several_numbers_of_ranks_and_packed_sequences() -> None:
    found = facts("plan", "--device", "h200", "--mask", "causal", "--ranks", "2-8", "--lengths", "3000,4x1000")
    assert [at["ranks"] for at in found["ranks"]] == [2, 4, 8] and found["lengths"] == [3000, 1000, 1000, 1000, 1000]
    shown = CliRunner(env=WIDE).invoke(app, ["plan", "--device", "h200", "--ranks", "2-8", "--mask", "causal"]).output
    assert "fewer bytes" in shown and "predicted, not measured" in shown


def test_few_ranks_are_drawn() -> None:
    shown = CliRunner(env=WIDE).invoke(app, ["plan", "--device", "h200", "--ranks", "4", "--mask", "causal"]).output
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("rank ")] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--ranks", "0"), ("--ranks", "5000"), ("--ranks", "8-"), ("--ranks", "many"), ("--lengths", "30,20")),
        *(("--ranks", "4", "--tile", "64x64"), ("--ranks", "4", "--all-devices"), ("--ranks", "4", "--lengths", "3x")),
        ("--ranks", "4", "--kv-seqlen", "10"),
    ],
    ids=" ".join,
)
def test_bad_options_are_one_line(arguments: tuple[str, ...]) -> None:
    done = CliRunner(env=WIDE).invoke(app, ["plan", "--device", "h200", *arguments])
    assert done.exit_code == 2 and "error: " in done.output and "Traceback" not in done.output


def test_ranks_and_lengths_as_text() -> None:
    assert parse_ranks("64") == [64] and parse_ranks("8-1024") == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert parse_ranks("64, 3,8-10") == [3, 8, 64]
    assert parse_lengths("5, 2×3,0") == (5, 3, 3, 0) and parse_lengths(None) is None
    with pytest.raises(ArgumentError, match="need from 1 to"):
        parse_ranks("9-8")


def test_the_table_of_the_docs() -> None:
    """docs/context-parallel.md: the bytes that each schedule sends, and the predicted times."""
    text = (Path(__file__).parents[2] / "docs" / "context-parallel.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `causal")]
    packed = (4096,) * 24 + (2048,) * 16
    cases = ((tw.causal(), None), (tw.causal() & tw.window(1024), None), (tw.causal(), packed))
    for line, (mask, lengths) in zip(lines, cases, strict=True):
        problem = tw.Problem.of(heads=32, kv_heads=8, head_dim=128, seqlen=131072, mask=mask)
        rows = {row.name: row for row in tw.distributed.compare(problem, 8, "h200", lengths=lengths)}
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name, cell in zip(("all-gather", "Ulysses", "planned"), cells[1:4], strict=True):
            sent = [int(part) for part in cell.removesuffix(" MiB").split(" + ")] if cell != "0" else [0, 0]
            row = rows[name]
            assert [round((size or 0) / 2**20) for size in (row.bytes_forward, row.bytes_backward)] == sent
        for name, cell in zip(("all-gather", "ring", "Ulysses", "planned"), cells[4:], strict=True):
            assert format_seconds(rows[name].seconds) == cell
        assert rows["ring"].bytes_forward == rows["all-gather"].bytes_forward


@pytest.mark.parametrize("device", ["h200", None])
@pytest.mark.parametrize("backward", [False, True])
def test_events_end_when_the_prediction_does(device: str | None, backward: bool) -> None:
    """The picture and the figure come from one set of times, on a GPU that overlaps and on a CPU that does not."""
    problem = tw.Problem.of(heads=8, head_dim=64, seqlen=20000, dtype="float32", mask=tw.causal())
    found = tw.distributed.plan(problem, ranks=5, device=device).predict(backward=backward)
    _check(found)


def test_events_of_uneven_ranks() -> None:
    compute, arrive, back = np.random.default_rng(0).random((3, 4, 6)) * np.array([1.0, 0.5, 0.2])[:, None, None]
    for overlaps in (True, False):
        _check(Prediction(compute, arrive, back * (back > 0.05), overlaps))


def _check(found: Prediction) -> None:
    seen = list(events(found))
    for rank, end in enumerate(found.ends):
        own = [event for event in seen if event.rank == rank]
        assert max(event.end for event in own) == pytest.approx(end)
        for kind, times in (("compute", found.compute), ("receive", found.arrive), ("return", found.back)):
            lane = sorted((event.start, event.end) for event in own if event.kind == kind)
            assert sum(stop - start for start, stop in lane) == pytest.approx(times[:, rank].sum())
            assert all(a[1] <= b[0] * (1 + 1e-12) for a, b in pairwise(lane))  # one thing at a time
