"""Threads, forks and concurrent callers: the same bits every time."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("llvmlite")

import tilewise as tw
from tilewise.backends.base import BackwardInputs, Inputs
from tilewise.backends.cpu import schedule
from tilewise.backends.cpu.backend import backend
from tilewise.problem import Problem


@pytest.fixture(autouse=True)
def always_shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems use threads too; the number of threads is put back."""
    monkeypatch.setattr("tilewise.model.cpu.SMALL_WORK", 0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tensors(heads: int, kv_heads: int, rows: int, keys: int, dim: int = 32) -> Inputs:
    g = torch.Generator().manual_seed(3)
    q = torch.randn(1, heads, rows, dim, generator=g)
    k, v = (torch.randn(1, kv_heads, keys, dim, generator=g) for _ in range(2))
    return Inputs(q, k, v)


def problem_of(inputs: Inputs, mask: tw.Mask | None = None) -> Problem:
    q, k = inputs.q, inputs.k
    return Problem.of(
        heads=q.shape[1], kv_heads=k.shape[1], seqlen=q.shape[2], kv_seqlen=k.shape[2], head_dim=q.shape[3],
        dtype="float32", mask=mask,
    )  # fmt: skip


def gradients(inputs: Inputs, mask: tw.Mask | None, threads: int) -> tuple[torch.Tensor, ...]:
    torch.set_num_threads(threads)
    problem = problem_of(inputs, mask)
    out, lse = backend.forward(problem, inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    grads = backend.backward(problem, inputs, BackwardInputs(out, lse, dout))
    return tuple(x for x in grads if x is not None)


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=["mha", "mqa"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_do_not_depend_on_the_number_of_threads(heads: tuple[int, int], causal: bool) -> None:
    inputs = tensors(*heads, rows=700, keys=700)
    mask = tw.causal() if causal else None
    alone = gradients(inputs, mask, 1)
    for threads in (2, 3, 5):
        assert all(torch.equal(a, b) for a, b in zip(alone, gradients(inputs, mask, threads), strict=True))


@pytest.mark.parametrize("rows", [1, 20], ids=["decode", "few"])
def test_shares_of_the_keys_merge_in_a_fixed_order(rows: int) -> None:
    inputs = tensors(1, 1, rows, 5000)
    torch.set_num_threads(4)
    problem = problem_of(inputs)
    first = backend.forward(problem, inputs)
    for _ in range(10):
        again = backend.forward(problem, inputs)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    torch.set_num_threads(1)
    alone = backend.forward(problem_of(inputs), inputs)
    torch.testing.assert_close(first[0], alone[0])
    torch.testing.assert_close(first[1], alone[1])


def test_callers_in_several_threads_get_their_own_results() -> None:
    torch.set_num_threads(2)
    cases = [tensors(2, 2, 40 + 8 * n, 90) for n in range(4)]
    wanted = [backend.forward(problem_of(c), c)[0] for c in cases]
    wrong: list[int] = []

    def work(n: int) -> None:
        torch.set_num_threads(2)
        for _ in range(50):
            if not torch.equal(backend.forward(problem_of(cases[n]), cases[n])[0], wanted[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _child(queue: multiprocessing.Queue[float]) -> None:
    inputs = tensors(2, 2, 64, 64)
    queue.put(backend.forward(problem_of(inputs), inputs)[0].double().sum().item())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("kind", ["torch's threads", "own threads"])
def test_a_forked_child_works_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "own threads":
        monkeypatch.setattr(schedule, "team", lambda: None)
    torch.set_num_threads(2)
    inputs = tensors(2, 2, 64, 64)
    here = backend.forward(problem_of(inputs), inputs)[0].double().sum().item()
    assert kind != "own threads" or schedule.pool.helpers > 0, "the parent should have threads by now"
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == here
    child.join(60)
    assert child.exitcode == 0


def test_a_late_helper_finds_the_job_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may finish before a helper wakes; the helper must then touch nothing."""
    monkeypatch.setattr(schedule, "team", lambda: None)
    pool, calls = schedule.Pool(), []
    for n in range(200):
        pool.run(lambda args, buffer, n=n: calls.append(n), schedule.ThreadScratch(), 64, 3)
    assert sorted(set(calls)) == list(range(200))
