"""Compiled kernels, each made and loaded once. One that cannot be made ends in an error, and is not tried again.

Kernels may be made ahead of their use. `collecting` runs a backend's launches without compiling or launching anything, and says
what they would compile. `Kernels.ahead` has that compiled by a thread; whoever then needs the kernel waits for it, and gets the
compiler's error if there was one. The thread loads nothing, for that would disturb a CUDA graph being captured.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from tilewise.backends.base import CompileJob
from tilewise.errors import KernelError


class Job(NamedTuple):
    """A kernel that is not compiled yet; `make` may be sent to another process."""

    kernels: Kernels
    key: Hashable
    name: str
    make: Callable[[], Any]


class Kernels:
    """The compiled kernels of a backend, by all they depend on."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._kernels: dict[Hashable, Any] = {}
        self._ahead: dict[Hashable, Future[Any]] = {}

    def get(self, key: Hashable, name: str, make: Callable[[], Any]) -> Any:
        """The kernel of a key, which `make` compiles; `name` is for messages. None while launches are collected."""
        kernel = self._kernels.get(key)
        if kernel is None:
            found = _collected.jobs
            if found is not None:
                found.append(Job(self, key, name, make))
                return None
            future = self._ahead.pop(key, None)
            kernel = self._kernels[key] = self._try(name, make if future is None else future.result)
        if isinstance(kernel, KernelError):
            raise KernelError(str(kernel)) from kernel
        if isinstance(kernel, Exception):
            raise kernel
        return kernel

    def ahead(self, key: Hashable, make: Callable[[], Any]) -> None:
        """Have a kernel compiled by the thread."""
        if key not in self._kernels and key not in self._ahead:
            future = self._ahead[key] = Future()
            _thread.add(future, make)
            _all.append(self)

    def _try(self, name: str, make: Callable[[], Any]) -> Any:
        import triton
        from triton.runtime.errors import OutOfResources

        try:
            kernel = make()
            _ = getattr(kernel, "run", None)  # loads it; raises where it does not fit the device
            return kernel
        except MemoryError:
            raise
        except KernelError as error:
            return error
        except OutOfResources as error:
            return KernelError(
                f"backend {self.backend!r}: {name} does not fit this GPU ({_first_line(error)}); tile= may choose a smaller tile,"
                " and backend='tiled' has no such limit"
            )
        except Exception as error:  # Triton's, LLVM's or the assembler's
            problem = KernelError(
                f"backend {self.backend!r} could not compile {name} with triton {triton.__version__} "
                f"({type(error).__name__}: {_first_line(error)}); another version of triton may, and backend='tiled' needs none"
            )
            problem.__cause__ = error
            return problem


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


class _Collected(threading.local):
    jobs: list[Job] | None = None  # of the class: every call asks, and what a thread's own memory lacks is slow to look for


_collected = _Collected()


@contextmanager
def collecting() -> Iterator[list[Job]]:
    """In this thread nothing is compiled or launched meanwhile; the list gets the kernels that would be compiled."""
    before = _collected.jobs
    jobs: list[Job] = []
    _collected.jobs = jobs
    try:
        yield jobs
    finally:
        _collected.jobs = before


def is_collecting() -> bool:
    return _collected.jobs is not None


def missing(backend: str, call: Callable[[], object]) -> list[CompileJob]:
    """What a call of a backend would compile, each kernel once."""
    with collecting() as jobs:
        call()
    return [
        CompileJob(f"{backend} {name}", make, partial(kernels.get, key, name, make), partial(kernels.ahead, key, make))
        for (kernels, key), (name, make) in {job[:2]: job[2:] for job in jobs}.items()
    ]


class _Thread:
    """Compiles what it is given, one after the other. It starts with the first and ends when there is nothing more to do."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.thread: threading.Thread | None = None

    def add(self, future: Future[Any], make: Callable[[], Any]) -> None:
        with self.lock:
            self.waiting.append((future, make))
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="tilewise-compile", daemon=True)
                self.thread.start()

    def _work(self) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    self.thread = None
                    return
                future, make = self.waiting.popleft()
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)

    def join(self) -> None:
        """Wait until there is nothing more to do."""
        while (thread := self.thread) is not None:
            thread.join()

    def stop(self) -> None:
        """At the end of the process: what has begun is finished, as a compiler does not survive the interpreter."""
        with self.lock:
            waiting, thread = list(self.waiting), self.thread
            self.waiting.clear()
        for future, _ in waiting:
            future.cancel()
        if thread is not None:
            thread.join()


_thread = _Thread()
_all: list[Kernels] = []
"""Those that had a kernel compiled ahead."""


def finish_compiling() -> None:
    """Wait until nothing is compiled in the background: what is timed meanwhile shares the interpreter with the compiler."""
    _thread.join()


def _start_anew() -> None:
    """In a child of fork: the thread is the parent's, and so is what it was about to compile."""
    global _thread
    _thread = _Thread()
    for kernels in _all:
        kernels._ahead.clear()


atexit.register(lambda: _thread.stop())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
