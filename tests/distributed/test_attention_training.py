"""Dropout, determinism, checkpointing and data parallelism over 2 and 3 ranks."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.training import CHECKS, check_training

SIZES = [2, 3]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    answers = run_ranks(max(SIZES), check_training, SIZES, store=tmp_path_factory.mktemp("training") / "store")
    assert all(isinstance(answer, dict) for answer in answers), "\n".join(map(str, answers))
    found: dict[tuple[str, int], str] = {}
    for answer in answers:
        for key, why in answer.items():
            found[key] = "; ".join(filter(None, (found.get(key, ""), why)))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHECKS)
def test_in_training(name: str, size: int, verdicts: dict[tuple[str, int], str]) -> None:
    assert verdicts[name, size] == ""
