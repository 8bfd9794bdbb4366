"""Models whose tokens are divided over processes: losses and gradients of one machine. The criterion is in context_models.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.distributed.processes import Ranks, start
from tests.integrations import context_models as models


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    kinds = (f"transformers.models.{name}.modeling_{name}" for name in models.CASES)
    with start(4, folder, *kinds) as running:
        yield running


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(models.CASES))
def test_losses_and_gradients_are_those_of_one_rank(ranks: Ranks, name: str, count: int) -> None:
    exact = models.alone(name)
    for found in ranks.run(count, models.on_ranks, name):
        assert models.apart(found, exact) <= 1
