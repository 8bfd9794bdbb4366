"""Threads: a small pool made at first use, and tasks shared out by an atomic counter inside the kernel.

Which thread computes a task never changes the task's result, so results do not depend on timing. The caller starts at once;
helpers join when they wake, and one that wakes too late finds no ticket and does nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from queue import SimpleQueue
from typing import Any

from torch import get_num_threads

from tilewise.backends.cpu.team import team as team

LINE = 64
PAGE = 4096
BLOCK_WORDS = 1024
BIN_BYTES = 1 << 16


class Desk:
    """What a thread needs for a call: its argument block and its buffer, grown as needed and kept."""

    __slots__ = ("address", "aside", "bin", "buffer", "holds", "memory", "size", "view", "words")

    def __init__(self) -> None:
        self.words = ctypes.create_string_buffer(8 * BLOCK_WORDS)
        self.view = memoryview(self.words).cast("B")
        self.address = ctypes.addressof(self.words)
        self.size = self.buffer = self.bin = 0
        self.memory: Any = None
        self.aside: Any = None
        self.holds: bytes | None = None
        """The words that were put into the block for calls to come; whoever writes others must forget them."""

    def room(self, size: int) -> int:
        """Address of a buffer of at least so many bytes."""
        if size > self.size:
            memory = ctypes.create_string_buffer(size + LINE)
            self.memory, self.buffer, self.size = memory, -(-ctypes.addressof(memory) // LINE) * LINE, size
        return self.buffer

    def prepare(self, words: bytes, size: int) -> None:
        """`words` into the block, at least `size` bytes at `buffer`, and at `bin` BIN_BYTES for what nobody will look at."""
        self.holds = None  # until all is there: memory may be refused
        self.room(size)
        if self.aside is None:
            aside = ctypes.create_string_buffer(BIN_BYTES)
            self.aside, self.bin = aside, ctypes.addressof(aside)
        self.view[: len(words)] = words
        self.holds = words


class Here(threading.local):
    """Each thread's desks. A call takes one away and brings it back: a signal handler or finalizer that calls attention in the
    middle of another call of the same thread finds it gone, and makes its own."""

    def __init__(self) -> None:
        self.desks: list[Desk] = []

    def take(self) -> Desk:
        try:
            return self.desks.pop()
        except IndexError:
            return Desk()


here = Here()


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

    def run(self, call: Any, desk: Desk, size: int, threads: int) -> None:
        """`call(arguments, buffer)` on up to `threads` threads, this one among them; returns when all tasks are done.

        A second caller, while the pool is busy, works alone: its threads would only compete with the first one's.
        """
        if threads <= 1:
            call(desk.address, desk.room(size))
            return
        token = object()
        try:
            # one step, with the owner's name in it: whatever interrupts this thread, the pool is given back
            if self.owner.setdefault("pool", token) is token:
                self._share(call, desk, size, threads)
            else:
                call(desk.address, desk.room(size))
        finally:
            if self.owner.get("pool") is token:
                del self.owner["pool"]

    def _share(self, call: Any, desk: Desk, size: int, threads: int) -> None:
        ours = team()
        if ours is not None:
            step = -(-size // PAGE) * PAGE
            buffers = desk.room(step * threads)
            address = ctypes.cast(call, ctypes.c_void_p).value or 0
            ours.run(address, desk.address, buffers, step, threads, get_num_threads())
            return
        buffer = desk.room(size)
        job = Job(call, desk.address, size, min(threads - 1, self._staff(threads - 1)))
        try:
            for _ in job.finished:
                self.jobs.put(job)
            call(desk.address, buffer)
        finally:
            self._await(job)

    def _staff(self, wanted: int) -> int:
        """How many helpers there are, after those that are lacking have been started if the system lets them."""
        try:
            while self.helpers < wanted:
                threading.Thread(target=self.help, name="tilewise", daemon=True).start()
                self.helpers += 1
        except RuntimeError:  # no more threads: the work is done by fewer
            pass
        return self.helpers

    def _await(self, job: Job) -> None:
        """Until no helper works on the job: they write to memory that is freed when an interrupt leaves this call."""
        absent, interrupt = self.close(job), None
        for ticket in range(absent, len(job.done)):  # tickets leave from the top: the lowest never did
            while not job.done[ticket]:
                try:
                    job.finished[ticket].acquire()
                except BaseException as error:  # a signal handler's, KeyboardInterrupt above all
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    @staticmethod
    def close(job: Job) -> int:
        """Take back the tickets nobody used, and count them. `list.pop` is atomic: a ticket has one owner."""
        unused = 0
        try:
            while True:
                job.tickets.pop()
                unused += 1
        except IndexError:
            return unused

    def help(self) -> None:
        while True:
            job = self.jobs.get()
            try:
                ticket = job.tickets.pop()
            except IndexError:
                continue
            desk = here.take()
            try:
                job.call(job.args, desk.room(job.size))
            finally:
                here.desks.append(desk)
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
    for name in ("sched_yield", "SwitchToThread"):
        try:
            library = ctypes.CDLL(None) if name == "sched_yield" else ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        except (AttributeError, OSError, TypeError):
            continue
    return 0
