"""Ranks agree, or all of them raise the same error: a small message from each.

What a rank says is either an error of its own, or facts that must be equal on all ranks. With gloo a digest of it travels before
every call, and the text only if digests differ; other backends would have to wait for a GPU, so there the text travels once for
a plan and the form of its calls.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from tilewise import errors
from tilewise.distributed.exchange import Link
from tilewise.errors import ArgumentError, PlanError, TilewiseError

BYTES = 2048
Facts = dict[str, Any]


def place_of(group: Any) -> torch.device:
    """Where a message of the group may lie, whatever the tensors of a call are: NCCL's are on the GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")


def check_place(group: Any, device: torch.device) -> None:
    """Raise if the group cannot send tensors of a device. Groups of several backends can, or say so themselves."""
    backend = dist.get_backend(group)
    if {"nccl": "cuda", "gloo": "cpu"}.get(backend, device.type) != device.type:
        raise ArgumentError(
            f"q: on {device.type}, and the group is one of {backend}, which sends no such tensors; make the group with "
            "init_process_group('cpu:gloo,cuda:nccl'), or move the tensors"
        )


def same(link: Link, ranks: int, facts: Facts | TilewiseError) -> bool:
    """Whether no rank has an error and all have the same facts; the answer is the same on every rank."""
    mine = 0 if isinstance(facts, TilewiseError) else int.from_bytes(blake2b(_words(facts), digest_size=7).digest()) | 1
    others, message = [rank for rank in range(ranks) if rank != link.own], torch.tensor([mine])
    label = "before stage 0, what it calls"
    pending = link.start(
        label, {rank: [message] for rank in others}, {rank: [(1,)] for rank in others}, message.dtype, message.device
    )
    said = {mine, *(int(digest) for (digest,) in pending.wait().values())}
    return len(said) == 1 and 0 not in said


def _words(facts: Facts | TilewiseError) -> bytes:
    """What a rank says, in full."""
    if isinstance(facts, TilewiseError):
        said = {"error": type(facts).__name__, "text": str(facts)[: BYTES // 8]}  # a character may take six bytes
    else:
        said = {name: str(value)[:64] for name, value in facts.items()}
    return json.dumps(said).encode().ljust(BYTES)


def agree(group: Any, facts: Facts | TilewiseError) -> None:
    """Raise on every rank the error of the lowest rank that has one, or what ranks disagree about."""
    mine = torch.frombuffer(bytearray(_words(facts)), dtype=torch.uint8).to(place_of(group))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(everyone, mine, group=group)
    except RuntimeError as error:
        raise errors.CommunicationError(
            f"context parallel: rank {dist.get_rank(group)}, before stage 0: a rank did not answer whether it has the same "
            f"problem; see its own error. From torch.distributed: {str(error).splitlines()[0]}"
        ) from error
    judge([json.loads(bytes(row.tolist())) for row in everyone])


def judge(answers: list[dict[str, str]]) -> None:
    """What the ranks said, as an error if it is one."""
    for rank, answer in enumerate(answers):
        if "error" in answer:
            kind = getattr(errors, answer["error"], ArgumentError)
            raise (kind if issubclass(kind, TilewiseError) else ArgumentError)(f"rank {rank}: {answer['text']}")
    for name in answers[0]:
        values = [answer.get(name) for answer in answers]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise PlanError(
                f"ranks disagree about {name}: rank 0 has {values[0]}, rank {other} has {values[other]}; "
                "every rank passes the same problem, options and dtypes, and its own shard of the tokens"
            )
