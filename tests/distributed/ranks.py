"""Processes that are the ranks of gloo groups, and what they run. They are forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Task = Callable[..., Any]
TIMEOUT = 60.0


def run_ranks(ranks: int, task: Task, *args: Any, store: Path, timeout: float = TIMEOUT, only: int | None = None) -> list[Any]:
    """What `task(rank, *args)` returns on each rank of a gloo group; a failure is returned as its text.

    only: the one rank whose answer counts; the others may die or stand still, and are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "tests.distributed.preload"])
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_main, args=(rank, ranks, str(store), timeout, pipes[rank][1], task, args), daemon=True)
        for rank in range(ranks)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    results: list[Any] = []
    for rank in range(ranks) if only is None else (only,):
        try:
            results.append(pipes[rank][0].recv())
        except EOFError:
            results.append(f"rank {rank} has died")
    for process in processes:
        process.join(timeout if only is None else 0.5)
        if process.is_alive():
            process.kill()
    return results


def _main(rank: int, ranks: int, store: str, timeout: float, sender: Any, task: Task, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    try:
        result = task(rank, *args)
    except Exception:
        result = traceback.format_exc(limit=-6)
    sender.send(result)
    sender.close()
    os._exit(0)  # a group whose ranks have died cannot be taken down in peace
