"""A call in the middle of another call of the same thread, and calls that are interrupted."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

import tilewise as tw
from tilewise.backends.cpu import schedule
from tilewise.backends.cpu.schedule import Pool, ThreadScratch


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(n: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("lse", [False, True], ids=["short way", "with lse"])
def test_a_call_inside_another_has_memory_of_its_own(lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, other = drawn(0, 1, 2, 24, 32), drawn(1, 1, 2, 24, 32)
    expected = tw.attention(q, q, q, backend="cpu", return_lse=lse)
    inner = tw.attention(other, other, other, backend="cpu")
    used: list[int] = []
    original = ThreadScratch.reserve

    def reserve(scratch: ThreadScratch, size: int) -> int:
        """Where a signal may come: after a call has taken its scratch memory."""
        address = original(scratch, size)
        if not used:
            used.append(scratch.address)
            assert torch.equal(tw.attention(other, other, other, backend="cpu"), inner)
            assert all(free.address != scratch.address for free in schedule.thread.free)
        return address

    monkeypatch.setattr(ThreadScratch, "reserve", reserve)
    monkeypatch.setattr(schedule.thread, "free", [])
    actual = tw.attention(q, q, q, backend="cpu", return_lse=lse)
    assert used
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)) if lse else torch.equal(actual, expected)


SIGNALS = """
import signal, sys, time, torch, tilewise as tw
torch.set_num_threads(int(sys.argv[1]))
shapes = [(1, 2, 24, 32), (2, 4, 64, 16)]
tensors = [torch.randn(s, requires_grad=True) for s in shapes]
def results(x):
    out, lse = tw.attention(x, x, x, backend="cpu", return_lse=True)
    return out, lse, torch.autograd.grad(out.sum(), x)[0], tw.attention(x.detach(), x.detach(), x.detach(), backend="cpu")
wanted = [results(x) for x in tensors]
count, inside = 0, False
def check(i):
    assert all(torch.equal(a, b) for a, b in zip(results(tensors[i]), wanted[i]))
def handler(*_):
    global count, inside
    if inside:
        return
    inside, count = True, count + 1
    with torch.enable_grad():
        check(1)
    inside = False
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0021)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    check(0)
signal.setitimer(signal.ITIMER_REAL, 0)
print(count)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
@pytest.mark.parametrize("threads", [1, 2])
def test_signal_handlers_may_call(threads: int) -> None:
    run = subprocess.run([sys.executable, "-c", SIGNALS, str(threads)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) > 10


class Interrupted(BaseException):
    pass


def test_an_interrupted_call_gives_the_pool_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever line of `run` the interrupt comes, also just after the pool was taken."""
    monkeypatch.setattr(schedule, "team", lambda: None)
    pool, scratch = Pool(), ThreadScratch()
    source, first = inspect.getsourcelines(Pool.run)
    last = first + next(n for n, line in enumerate(source) if line.strip() == "finally:")
    seen: set[int] = set()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is not Pool.run.__code__:
            return None
        if event == "line" and frame.f_lineno < last and frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            raise Interrupted
        return trace

    before, interrupts = sys.gettrace(), 0
    for _ in range(20):
        sys.settrace(trace)
        try:
            pool.run(lambda args, buffer: None, scratch, 64, 2)
        except Interrupted:
            interrupts += 1
        finally:
            sys.settrace(before)
        assert not pool.owner
    assert interrupts == len(seen) >= 4


def test_helpers_are_waited_for_whatever_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write to the caller's memory, which an exception would free."""
    monkeypatch.setattr(schedule, "team", lambda: None)
    pool, scratch, started, finished = Pool(), ThreadScratch(), threading.Event(), threading.Event()
    main = threading.get_ident()

    def call(args: int, buffer: int) -> None:
        if threading.get_ident() == main:
            assert started.wait(30)
            raise KeyboardInterrupt
        started.set()
        threading.Event().wait(0.3)
        finished.set()

    with pytest.raises(KeyboardInterrupt):
        pool.run(call, scratch, 64, 2)
    assert finished.is_set() and not pool.owner


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
def test_a_signal_while_waiting_for_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "team", lambda: None)
    pool, scratch, started, finished = Pool(), ThreadScratch(), threading.Event(), threading.Event()
    main = threading.get_ident()

    def call(args: int, buffer: int) -> None:
        if threading.get_ident() == main:
            assert started.wait(30)
            return
        started.set()
        threading.Event().wait(0.5)
        finished.set()

    def raising(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raising)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            pool.run(call, scratch, 64, 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert finished.is_set() and not pool.owner


def test_a_system_without_more_threads_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "team", lambda: None)
    monkeypatch.setattr(schedule, "pool", Pool())
    monkeypatch.setattr("tilewise.model.cpu.SMALL_WORK", 0)
    q = drawn(0, 2, 4, 100, 32)
    torch.set_num_threads(1)
    expected = tw.attention(q, q, q, backend="cpu")

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    torch.set_num_threads(3)
    assert torch.equal(tw.attention(q, q, q, backend="cpu"), expected)
