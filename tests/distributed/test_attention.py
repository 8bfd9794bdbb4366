"""Context parallelism over 2, 3 and 4 gloo ranks: every case within the derived bounds of the oracle of the whole problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.cases import BY_NAME
from tests.distributed.conformance import check_cases
from tests.distributed.ranks import run_ranks

SIZES = [2, 3, 4]
RUNS = [(name, size) for name, case in BY_NAME.items() for size in SIZES if case.runs_on(size)]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    """All cases by all groups: four processes, started once."""
    store: Path = tmp_path_factory.mktemp("ranks") / "store"
    answers = run_ranks(max(SIZES), check_cases, list(BY_NAME), SIZES, store=store)
    assert all(isinstance(answer, dict) for answer in answers), "\n".join(map(str, answers))
    found: dict[tuple[str, int], str] = {}
    for answer in answers:
        for key, verdict in answer.items():
            found[key] = "; ".join(filter(None, (found.get(key, ""), verdict.wrong)))
    return found


@pytest.mark.parametrize(("name", "size"), RUNS)
def test_forward_gradients_and_bytes(name: str, size: int, wrong: dict[tuple[str, int], str]) -> None:
    assert wrong[name, size] == ""
