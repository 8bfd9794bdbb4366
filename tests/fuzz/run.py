"""Workers and their books: starts them, notices crashes and hangs, and starts others in their place."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.draw import NAMES, PROFILES, SERIALS

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "tests.fuzz.worker")
HANG_S = {"cpu": 120.0, "interpreter": 300.0, "gpu": 300.0}
"""No case takes so long, compilation included."""
RECYCLE = 3000
"""Cases after which a worker makes room for a fresh one: what kernels leave in memory goes with it."""
TELL_EVERY_S = 10.0


class Lane(NamedTuple):
    """Backends that share a process."""

    profile: str
    device: str
    backends: tuple[str, ...]
    interpret: bool = False


class Failure(NamedTuple):
    number: int
    backend: str
    device: str
    words: str


@dataclass
class Books:
    """What was run, by backend."""

    cases: int = 0
    right: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        minutes = (time.monotonic() - self.began) / 60
        wrong = Counter(failure.backend for failure in self.failures)
        names = [*dict.fromkeys([*self.right, *wrong])]
        parts = " ".join(f"{name} {self.right[name]}/{wrong[name]}" for name in names)
        rate = self.cases / max(minutes, 1e-3)
        return f"{minutes:5.1f} min  {self.cases} cases, {rate:.0f} a minute; right/failed: {parts or 'none yet'}"

    def table(self) -> str:
        wrong = Counter(failure.backend for failure in self.failures)
        lines = [f"{'backend':12} {'right':>8} {'refused':>8} {'failed':>8}"]
        for name in dict.fromkeys([*self.right, *self.refused, *wrong]):
            lines.append(f"{name:12} {self.right[name]:8} {self.refused[name]:8} {wrong[name]:8}")
        reasons = [f"  {n:6} {name}: {reason[:150]}" for (name, reason), n in self.reasons.most_common(12)]
        return "\n".join([*lines, *(["refused because (a case may have several reasons):", *reasons] if reasons else [])])


class Slot:
    """One place for a worker: the cases of every `step`-th family."""

    def __init__(self, lane: Lane, family: int, step: int, cases: int, end: float) -> None:
        self.lane, self.family, self.step, self.left, self.end = lane, family, step, cases, end
        self.after = -1
        self.doing: tuple[int, str] | None = None
        self.since = time.monotonic()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the slot
        self.process: subprocess.Popen[str] | None = None

    def start(self, lines: queue.Queue[tuple[Slot, str | None]]) -> bool:
        """False where nothing is left to do."""
        seconds = self.end - time.monotonic()
        if self.left <= 0 or seconds <= 1:
            return False
        lane = self.lane
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment.pop("TRITON_INTERPRET", None)
        if lane.interpret:
            environment["TRITON_INTERPRET"] = "1"
        first = max(self.after // len(NAMES) // PROFILES[lane.profile].family, self.family) if self.after >= 0 else self.family
        given = {
            "profile": lane.profile, "device": lane.device, "backends": ",".join(lane.backends), "family": first,
            "step": self.step, "after": self.after, "cases": min(self.left, RECYCLE), "seconds": seconds,
        }  # fmt: skip
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        self.log.seek(0)
        self.log.truncate()
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        self.doing, self.since = None, time.monotonic()
        threading.Thread(target=self._listen, args=(self.process, lines), daemon=True).start()
        return True

    def _listen(self, process: subprocess.Popen[str], lines: queue.Queue[tuple[Slot, str | None]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put((self, line))
        process.wait()
        lines.put((self, None))

    def hung(self) -> bool:
        return self.doing is not None and time.monotonic() - self.since > HANG_S[self.lane.profile]

    def last_words(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace").strip()[-600:]


def run(lane: Lane, books: Books, *, seed: int, workers: int, seconds: float, cases: int) -> None:
    """Run a lane for that long, or for so many cases."""
    lines: queue.Queue[tuple[Slot, str | None]] = queue.Queue()
    end = time.monotonic() + seconds
    first = -(-seed * SERIALS // PROFILES[lane.profile].family)
    slots = [Slot(lane, first + w, workers, -(-cases // workers), end) for w in range(workers)]
    running = {slot for slot in slots if slot.start(lines)}
    told = time.monotonic()
    try:
        while running:
            try:
                slot, line = lines.get(timeout=1.0)
            except queue.Empty:
                slot = line = None  # type: ignore[assignment]
            if line is not None:
                _note(slot, json.loads(line), books)
            elif slot is not None and not _ended(slot, books, lines):
                running.discard(slot)
            for each in running:
                if each.hung() and each.process is not None:
                    each.process.kill()
            if time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                print(books.line(), flush=True)
    finally:
        for slot in slots:
            if slot.process is not None and slot.process.poll() is None:
                slot.process.kill()


def _note(slot: Slot, line: dict[str, Any], books: Books) -> None:
    if "begin" in line:
        slot.doing, slot.since = tuple(line["begin"]), time.monotonic()
    elif "case" in line:
        slot.doing, slot.after = None, line["case"]
        slot.left -= 1
        books.cases += 1
    else:
        number, backend, failures, refused = line["end"]
        if failures:
            books.failures.append(Failure(number, backend, slot.lane.device, "; ".join(failures)))
            print(f"case {number} fails on {backend}: {failures[0][:200]}", flush=True)
        elif refused:
            books.refused[backend] += 1
            books.reasons.update((backend, re.sub(r"\d+", "N", reason)) for reason in refused)
        else:
            books.right[backend] += 1


def _ended(slot: Slot, books: Books, lines: queue.Queue[tuple[Slot, str | None]]) -> bool:
    """A worker is gone: crashed, killed because it hung, or done. Whether another one took its place."""
    assert slot.process is not None
    if slot.process.returncode == 0:
        return slot.start(lines)
    number, backend = slot.doing or (slot.after, "worker")
    what = "hangs" if slot.hung() else f"ends the process (status {slot.process.returncode})"
    words = f"{what}: {slot.last_words()}"
    books.failures.append(Failure(number, backend, slot.lane.device, words))
    print(f"case {number} {what.split(':')[0]} on {backend}", flush=True)
    if slot.doing is None:
        return False  # it died before any case: another would, too
    slot.after = number
    books.cases += 1
    slot.left -= 1
    return slot.start(lines)
