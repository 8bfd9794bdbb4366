"""Ranks agree, or all of them raise the same error: a small message from each, once for a plan and the form of its calls.

What a rank says is either an error of its own, or facts that must be equal on all ranks.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from tilewise import errors
from tilewise.errors import ArgumentError, PlanError, TilewiseError

BYTES = 2048
Facts = dict[str, Any]


def agree(group: Any, facts: Facts | TilewiseError, device: torch.device) -> None:
    """Raise on every rank the error of the lowest rank that has one, or what ranks disagree about."""
    if isinstance(facts, TilewiseError):
        said: dict[str, Any] = {"error": type(facts).__name__, "text": str(facts)[: BYTES // 4]}
    else:
        said = {name: str(value)[:64] for name, value in facts.items()}
    words = json.dumps(said).encode()[:BYTES].ljust(BYTES)
    mine = torch.frombuffer(bytearray(words), dtype=torch.uint8).to(device)
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
