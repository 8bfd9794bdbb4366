"""Tensors between ranks: one message a pair of ranks, asynchronous, its bytes counted as they are sent.

Every rank takes part in every exchange, if only to count it: its number is the tag of its messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import CommunicationError

Outgoing = Mapping[int, Sequence[Tensor]]
Incoming = Mapping[int, Sequence[tuple[int, ...]]]
TAGS = 1 << 20


@dataclass
class Counter:
    """What a plan's links have done so far."""

    sent: int = 0
    exchanges: int = 0


class Link:
    """A process group, or some ranks of it, as one plan uses it; a rank is known by its place in `peers`."""

    def __init__(self, group: Any, rank: int, peers: Sequence[int] | None = None, counter: Counter | None = None) -> None:
        self.group, self.own, self.peers = group, rank, peers
        self.counter = counter or Counter()

    @property
    def sent(self) -> int:
        """Bytes sent so far."""
        return self.counter.sent

    def within(self, peers: Sequence[int]) -> Link:
        """A link among these ranks alone."""
        return type(self)(self.group, self.own, peers, self.counter)

    def of(self, peer: int) -> int:
        """A peer's rank in the group."""
        return peer if self.peers is None else self.peers[peer]

    def start(
        self, label: str, outgoing: Outgoing, incoming: Incoming, dtype: torch.dtype, device: torch.device
    ) -> Pending:
        """Send tensors to ranks and receive those of the given shapes from ranks; both begin now.

        label: what travels, for an error: "stage 2: k and v".
        """
        self.counter.exchanges += 1
        pending = Pending(self, label, incoming)
        ops = []
        for peer, tensors in outgoing.items():
            message = joined_message(tensors)
            self.counter.sent += message.numel() * message.element_size()
            ops.append(self._op(dist.isend, message, peer))
            pending.messages.append((peer, "to", message))
        for peer, shapes in incoming.items():
            buffer = torch.empty(sum(map(_count, shapes)), dtype=dtype, device=device)
            ops.append(self._op(dist.irecv, buffer, peer))
            pending.messages.append((peer, "from", buffer))
        together = device.type != "cpu"  # as NCCL wants it; gloo begins one after another, and may fail at any of them
        for some in [ops] * bool(ops) if together else [[op] for op in ops]:
            try:
                pending.works += dist.batch_isend_irecv(some)
            except RuntimeError as error:
                late = None if together else pending.messages[ops.index(some[0])][0]
                raise pending.failure(late, error) from error
        return pending

    def _op(self, kind: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        target = dist.get_global_rank(self.group, self.of(peer))
        return dist.P2POp(kind, tensor, target, self.group, self.counter.exchanges % TAGS)


class Pending:
    """An exchange under way."""

    def __init__(self, link: Link, label: str, incoming: Incoming) -> None:
        self.link, self.label, self.incoming = link, label, incoming
        self.works: list[Any] = []
        self.messages: list[tuple[int, str, Tensor]] = []

    def wait(self) -> dict[int, list[Tensor]]:
        """What came from each rank. Raises, naming ranks and stage, if one has died or the group's timeout has passed."""
        named = len(self.works) == len(self.messages)  # NCCL gives one work for all of them
        pairs: Iterator[tuple[Any, int | None]] = zip(
            self.works, [peer for peer, _, _ in self.messages] if named else [None] * len(self.works), strict=True
        )
        for work, peer in reversed(list(pairs)):  # what is to be received first: a timeout then names who is late
            try:
                work.wait()
            except RuntimeError as error:
                raise self.failure(peer, error) from error
        received = {peer: buffer for peer, way, buffer in self.messages if way == "from"}
        return {peer: parted_message(received[peer], shapes) for peer, shapes in self.incoming.items()}

    def failure(self, peer: int | None, error: RuntimeError) -> CommunicationError:
        others = sorted({peer for peer, _, _ in self.messages}) if peer is None else [peer]
        names = " or ".join(f"rank {self.link.of(other)}" for other in others)
        return CommunicationError(
            f"context parallel: rank {self.link.own}, {self.label}: {names} did not answer. It has died, stands still, or "
            f"computes something else; see its own error. From torch.distributed: {str(error).splitlines()[0]}"
        )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def joined_message(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one dtype as one message."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1).contiguous()  # one token of each head is a view with gaps
    message = tensors[0].new_empty(sum(x.numel() for x in tensors))
    for part, x in zip(message.split([x.numel() for x in tensors]), tensors, strict=True):
        part.view(x.shape).copy_(x)
    return message


def parted_message(message: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = message.split(list(map(_count, shapes)))
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
