"""Shared by all tests: GPU tests are skipped where there is no GPU, torch uses the threads the run gives it."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)  # as many workers as cores: more threads would only wait for each other


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = "needs a GPU"
    if torch.cuda.is_available():
        if all(item.get_closest_marker("gpu") for item in items):
            return
        reason = "GPU tests run by themselves: pytest -m gpu"  # others run kernels as threads, in the compiler's place
    skip = pytest.mark.skip(reason=reason)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
