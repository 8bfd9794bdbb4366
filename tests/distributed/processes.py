"""Processes of one gloo group, kept while a test module runs: starting them costs more than what they do."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds until a rank that does not answer counts as stuck."""
GLOO_TIMEOUT = timedelta(seconds=60)


class Ranks:
    """`run(function, *arguments)` calls a module's function on the first ranks, and gives what each of them returns."""

    def __init__(self, pipes: list[Any]) -> None:
        self.pipes = pipes

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self.pipes[:ranks]:
            pipe.send((ranks, function, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes[:ranks]):
            assert pipe.poll(PATIENCE), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        failed = {rank: text for rank, (ok, text) in enumerate(answers) if not ok}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        return [answer for _, answer in answers]


@contextmanager
def start(ranks: int, folder: Path, *preload: str) -> Iterator[Ranks]:
    """So many processes, with torch and the modules `preload`, which must be installed ones, imported once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", *preload])
    pairs = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=_serve, args=(rank, ranks, folder / "store", end), daemon=True)
        for rank, (_, end) in enumerate(pairs)
    ]
    for process, (_, end) in zip(processes, pairs, strict=True):
        process.start()
        end.close()  # so that the end of a process is the end of its pipe
    try:
        yield Ranks([pipe for pipe, _ in pairs])
    finally:
        for process, (pipe, _) in zip(processes, pairs, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, ranks: int, store: Path, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=GLOO_TIMEOUT)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, ranks + 1)}
    while (job := pipe.recv()) is not None:
        count, function, arguments = job
        try:
            pipe.send((True, function(groups[count], *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
