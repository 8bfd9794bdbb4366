"""The ranks of a plan as threads of one process: any number of them, no process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewise.distributed.context import ContextPlan
from tilewise.distributed.exchange import Incoming, Link, Outgoing

Result = TypeVar("Result")
TIMEOUT = 30.0


class ThreadLink(Link):
    """Messages through queues, one for each pair of ranks."""

    def __init__(self, queues: Mapping[tuple[int, int], Queue[Any]], rank: int) -> None:
        super().__init__(None, rank)
        self.queues = queues

    def start(self, label: str, outgoing: Outgoing, incoming: Incoming, dtype: torch.dtype, device: torch.device) -> Any:
        for peer, tensors in outgoing.items():
            assert peer != self.rank and all(x.dtype == dtype for x in tensors), label
            self.sent += sum(x.numel() * x.element_size() for x in tensors)
            self.queues[self.rank, peer].put((label, [x.clone() for x in tensors]))
        return _Waiting(self, label, incoming)


class _Waiting:
    def __init__(self, link: ThreadLink, label: str, incoming: Incoming) -> None:
        self.link, self.label, self.incoming = link, label, incoming

    def wait(self) -> dict[int, list[Tensor]]:
        received = {}
        for peer, shapes in self.incoming.items():
            label, tensors = self.link.queues[peer, self.link.rank].get(timeout=TIMEOUT)
            assert label == self.label and [tuple(x.shape) for x in tensors] == list(shapes), (label, self.label)
            received[peer] = tensors
        return received


def on_ranks(plan: ContextPlan, task: Callable[[ContextPlan, Link], Result]) -> list[Result]:
    """What a task gives on each rank of a simulated plan."""
    queues: dict[tuple[int, int], Queue[Any]] = {
        (a, b): Queue() for a in range(plan.ranks) for b in range(plan.ranks) if a != b
    }
    plans = [replace(plan, rank=rank) for rank in range(plan.ranks)]
    with ThreadPoolExecutor(plan.ranks) as pool:
        return list(pool.map(lambda own: task(own, ThreadLink(queues, own.rank)), plans))
