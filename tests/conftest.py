"""Shared by all tests: GPU tests are skipped where there is no GPU, torch uses the threads the run gives it, and no two workers
compile the same kernel for a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest
import torch

LONG = tuple(f"tests/{name}/" for name in ("integrations", "distributed", "diagnostics"))
"""Folders whose GPU tests take 20 to 30 s each: whole models, and processes of their own."""


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)  # as many workers as cores: more threads would only wait for each other


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = "needs a GPU"
    if torch.cuda.is_available():
        if all(item.get_closest_marker("gpu") for item in items):
            items[:] = spread(items)
            return
        reason = "GPU tests run by themselves: pytest -m gpu"  # others run kernels as threads, in the compiler's place
    skip = pytest.mark.skip(reason=reason)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests that take long evenly among the others: workers take neighbours, and at the end a few would be left with them."""
    long = [item for item in items if item.nodeid.startswith(LONG)]
    short = [item for item in items if not item.nodeid.startswith(LONG)]
    places = [(n / max(len(some), 1), item.nodeid, item) for some in (long, short) for n, item in enumerate(some)]
    return [item for *_, item in sorted(places, key=lambda place: place[:2])]


@pytest.fixture(scope="session", autouse=True)
def one_worker_compiles_a_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers that want the same kernel at once wait for the first; then it lies in Triton's cache."""
    if not (torch.cuda.is_available() and os.environ.get("PYTEST_XDIST_WORKER")):
        yield
        return
    import fcntl  # where there is Triton, there is this

    from tilewise.backends.gpu import launch

    compile_for, locks = launch.compile_for, tmp_path_factory.getbasetemp().parent / "kernels"
    locks.mkdir(exist_ok=True)

    def alone(target: Any, kernel: Any, *rest: Any) -> Any:
        name = sha256(f"{target} {kernel.__module__}.{kernel.__name__} {rest}".encode()).hexdigest()
        with (locks / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_for(target, kernel, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "compile_for", alone)
        yield
