"""Compiling in several processes at once.

A process is a fresh interpreter with this one's search path that takes functions from its input and answers with the seconds each
took, or its error. It imports nothing of the caller's program, so that scripts need no guard.
"""

from __future__ import annotations

import pickle
import queue
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

START = "import sys; sys.path[:] = {path!r}; from tilewise.api.compile_pool import serve; serve()"
_SIZE = struct.Struct("<q")
Outcome = tuple[float, str | None]
"""Seconds, and the error if there was one."""


def compile_in_processes(
    makes: Sequence[Callable[[], object]], processes: int, on_done: Callable[[int, int], None]
) -> list[Outcome]:
    """Call every function in one of the processes; `on_done(which, how many are done)` after each."""
    found: list[Outcome] = [(0.0, None)] * len(makes)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done, lock = 0, threading.Lock()
    for i in range(len(makes)):
        waiting.put(i)

    def work() -> None:
        nonlocal done
        process: subprocess.Popen[bytes] | None = None
        while True:
            try:
                i = waiting.get_nowait()
            except queue.Empty:
                break
            process = process or _start()
            found[i] = _ask(process, makes[i])
            if process.poll() is not None:
                process = None
            with lock:
                done += 1
                on_done(i, done)
        if process is not None:
            _end(process)

    threads = [threading.Thread(target=work) for _ in range(min(processes, len(makes)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _start() -> subprocess.Popen[bytes]:
    code = START.format(path=[*sys.path])
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ask(process: subprocess.Popen[bytes], make: Callable[[], object]) -> Outcome:
    assert process.stdin is not None and process.stdout is not None
    start = time.perf_counter()
    try:
        _write(process.stdin, make)
        answer: Outcome = _read(process.stdout)
        return answer
    except (OSError, EOFError):
        code = process.wait()
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        return time.perf_counter() - start, f"the compiling process ended {how}"


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


def _write(stream: BinaryIO | Any, value: object) -> None:
    data = pickle.dumps(value)
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def _read(stream: BinaryIO | Any) -> Any:
    head = stream.read(_SIZE.size)
    if len(head) < _SIZE.size:
        raise EOFError
    data = stream.read(_SIZE.unpack(head)[0])
    return pickle.loads(data)


def serve() -> None:
    """Answer until the input ends. What compilers print goes to stderr: the output is for answers."""
    import os

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            make = _read(sys.stdin.buffer)
        except EOFError:
            return
        start, error = time.perf_counter(), None
        try:
            make()
        except Exception as problem:  # the compiler's; whoever asked shows it
            error = str(problem) or type(problem).__name__
        _write(answers, (time.perf_counter() - start, error))
