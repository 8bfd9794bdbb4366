"""Threads: a small pool made at first use, and tasks shared out by an atomic counter inside the kernel.

Which thread computes a task never changes the task's result, so results do not depend on timing. The caller starts at once;
helpers join when they wake, and one that wakes too late finds no ticket and does nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
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
    """Each thread's desk."""

    def __init__(self) -> None:
        self.desk = Desk()


here = Here()


class Job:
    """One call's work for helpers: a ticket lets one of them in, a lock tells that it is done."""

    __slots__ = ("args", "call", "finished", "size", "tickets")

    def __init__(self, call: Any, args: int, size: int, helpers: int) -> None:
        self.call, self.args, self.size = call, args, size
        self.tickets = list(range(helpers))
        self.finished = [threading.Lock() for _ in range(helpers)]
        for lock in self.finished:
            lock.acquire()


class Pool:
    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.helpers = 0
        self.busy = threading.Lock()

    def run(self, call: Any, args: int, size: int, threads: int) -> None:
        """`call(args, buffer)` on up to `threads` threads, this one among them; returns when all tasks are done.

        A second caller, while the pool is busy, works alone: its threads would only compete with the first one's.
        """
        if threads <= 1 or not self.busy.acquire(blocking=False):
            call(args, here.desk.room(size))
            return
        try:
            ours = team()
            if ours is not None:
                step = -(-size // PAGE) * PAGE
                buffers = here.desk.room(step * threads)
                ours.run(ctypes.cast(call, ctypes.c_void_p).value or 0, args, buffers, step, threads, get_num_threads())
                return
            while self.helpers < threads - 1:
                threading.Thread(target=self.help, name="tilewise", daemon=True).start()
                self.helpers += 1
            job = Job(call, args, size, threads - 1)
            for _ in range(threads - 1):
                self.jobs.put(job)
            call(args, here.desk.room(size))
            absent = self.close(job)
            for lock in job.finished[absent:]:  # tickets leave from the top: the lowest never did
                lock.acquire()
        finally:
            self.busy.release()

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
            try:
                job.call(job.args, here.desk.room(job.size))
            finally:
                job.finished[ticket].release()


pool = Pool()


def _renew() -> None:
    """A forked child has none of its parent's threads."""
    global pool
    pool = Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
