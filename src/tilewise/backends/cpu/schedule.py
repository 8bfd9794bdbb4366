"""Threads: a small pool made at first use, and tasks shared out by an atomic counter inside the kernel.

Which thread computes a task never changes the task's result, so results do not depend on timing. The caller starts at once;
helpers join when they wake, and one that wakes too late finds no ticket and does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from functools import cache
from queue import SimpleQueue
from typing import Any

from tilewise.backends.cpu.spec import ARGUMENTS
from tilewise.backends.cpu.team import team as team

LINE = 64
PAGE = 4096
DISCARD_BYTES = 1 << 16


class ThreadScratch:
    """A thread's memory for one call: the argument block, the buffer, and room for results that nobody reads.

    The buffer grows as needed and is kept.
    """

    __slots__ = ("address", "buffer", "discard", "memory", "prepared", "size", "view")

    def __init__(self) -> None:
        fixed = ctypes.create_string_buffer(8 * ARGUMENTS + DISCARD_BYTES)
        self.view = memoryview(fixed).cast("B")  # keeps the memory alive
        self.address = ctypes.addressof(fixed)
        self.discard = self.address + 8 * ARGUMENTS
        self.size = self.buffer = 0
        self.memory: Any = None
        self.prepared: bytes | None = None
        """Arguments that are in the block for calls to come; whoever writes others sets it to None."""

    def reserve(self, size: int) -> int:
        """Address of a buffer of at least so many bytes."""
        if size > self.size:
            memory = ctypes.create_string_buffer(size + LINE)
            self.memory, self.buffer, self.size = memory, -(-ctypes.addressof(memory) // LINE) * LINE, size
        return self.buffer

    def prepare(self, arguments: bytes, size: int) -> None:
        """Put `arguments` into the block and reserve `size` bytes."""
        self.prepared = None  # until all is there: memory may be refused
        self.reserve(size)
        self.view[: len(arguments)] = arguments
        self.prepared = arguments


class _ThreadLocal(threading.local):
    """The scratch memory of the current thread that no call uses.

    A call takes one and gives it back: a signal handler or finalizer that calls attention in the middle of another call of the
    same thread does not see it, and makes its own.
    """

    def __init__(self) -> None:
        self.free: list[ThreadScratch] = []

    def take(self) -> ThreadScratch:
        try:
            return self.free.pop()
        except IndexError:
            return ThreadScratch()


thread = _ThreadLocal()


class Job:
    """One call's work for helpers: a ticket lets one of them in, a lock tells that it is done."""

    __slots__ = ("args", "call", "done", "finished", "size", "tickets")

    def __init__(self, call: Any, args: int, size: int, helpers: int) -> None:
        self.call, self.args, self.size = call, args, size
        self.tickets = list(range(helpers))
        self.done = [False] * helpers
        self.finished = [threading.Lock() for _ in range(helpers)]
        for lock in self.finished:
            lock.acquire()


class Pool:
    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.helpers = 0
        self.owner: dict[str, object] = {}

    def run(self, call: Any, scratch: ThreadScratch, size: int, threads: int) -> None:
        """`call(arguments, buffer)` on up to `threads` threads, this one among them; returns when all tasks are done.

        A second caller, while the pool is busy, works alone: its threads would only compete with the first one's.
        """
        token = object()
        try:
            # one step, with the owner's name in it: whatever interrupts this thread, the pool is given back
            if threads > 1 and self.owner.setdefault("pool", token) is token:
                self._run_shared(call, scratch, size, threads)
            else:
                call(scratch.address, scratch.reserve(size))
        finally:
            if self.owner.get("pool") is token:
                del self.owner["pool"]

    def _run_shared(self, call: Any, scratch: ThreadScratch, size: int, threads: int) -> None:
        region = team()
        if region is not None:
            step = -(-size // PAGE) * PAGE
            buffers = scratch.reserve(step * threads)
            address = ctypes.cast(call, ctypes.c_void_p).value or 0
            region(address, scratch.address, buffers, step, threads)
            return
        buffer = scratch.reserve(size)
        job = Job(call, scratch.address, size, min(threads - 1, self._start_helpers(threads - 1)))
        try:
            for _ in job.finished:
                self.jobs.put(job)
            call(scratch.address, buffer)
        finally:
            self._wait(job)

    def _start_helpers(self, wanted: int) -> int:
        """How many helpers there are, after those that are missing have been started, if the system lets them."""
        try:
            while self.helpers < wanted:
                threading.Thread(target=self.help, name="tilewise", daemon=True).start()
                self.helpers += 1
        except RuntimeError:  # no more threads: the work is done by fewer
            pass
        return self.helpers

    def _wait(self, job: Job) -> None:
        """Waits until no helper works on the job: they write to memory that is freed when an interrupt leaves this call."""
        unused, interrupt = 0, None
        with contextlib.suppress(IndexError):  # `list.pop` is atomic: a ticket has one owner
            while True:
                job.tickets.pop()
                unused += 1
        for ticket in range(unused, len(job.done)):  # tickets leave from the top: the lowest never did
            while not job.done[ticket]:
                try:
                    job.finished[ticket].acquire()
                except BaseException as error:  # a signal handler's, KeyboardInterrupt above all
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def help(self) -> None:
        while True:
            job = self.jobs.get()
            try:
                ticket = job.tickets.pop()
            except IndexError:
                continue
            scratch = thread.take()
            try:
                job.call(job.args, scratch.reserve(job.size))
            finally:
                thread.free.append(scratch)
                job.done[ticket] = True
                job.finished[ticket].release()


pool = Pool()


def _renew() -> None:
    """A forked child has none of its parent's threads."""
    global pool
    pool = Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@cache
def pause() -> int:
    """Address of a function that yields the processor; 0 where there is none."""
    if os.name == "nt":
        function = ctypes.WinDLL("kernel32").SwitchToThread  # type: ignore[attr-defined]
    else:
        function = getattr(ctypes.CDLL(None), "sched_yield", None)
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function else 0
