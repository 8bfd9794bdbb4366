"""Train a small GPT whose sequence is divided over processes: one layer sees a window, the next everything before.

    torchrun --nproc-per-node 4 examples/context_parallel.py
    torchrun --nproc-per-node 4 examples/context_parallel.py --length 32768 --steps 5

Every process holds the model and a part of the tokens. The losses are those of one process alone, which runs without torchrun:

    python examples/context_parallel.py

What each keeps for the gradients falls with the number of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tiny_gpt import TinyGPT, repository_text
from torch import Tensor
from torch.nn import functional as F

import tilewise as tw
from tilewise.lab.bench.memory import forget_peak, resident
from tilewise.nn import Attention, KeyValueCache

WINDOW = 256
MASKS = (tw.causal() & tw.window(WINDOW), tw.causal())


class PlannedAttention(Attention):
    """The same layer over the tokens of all processes."""

    plan: tw.distributed.ContextPlan

    def forward(self, x: Tensor, *, cache: KeyValueCache | None = None) -> Tensor:  # type: ignore[override]
        split = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv(x).unflatten(-1, (sum(split), self.head_dim)).split(split, dim=-2)  # (B, own tokens, H, D) each
        positions = self.plan.positions(device=x.device)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        out = tw.distributed.attention(q, k, v, self.plan, layout="bshd")
        return self.out(out.flatten(-2))


class Rank(NamedTuple):
    """What one process has to say at the end."""

    tokens: int
    kept: int
    grown: int
    sent: int


def make_model(length: int, group: Any) -> tuple[TinyGPT, tw.distributed.ContextPlan]:
    """The model, the same on every process, with a plan for each layer's mask over one division of the tokens."""
    torch.manual_seed(0)
    model = TinyGPT(layers=len(MASKS), kind=PlannedAttention)
    shards: Any = "balanced"
    for mask, block in reversed(list(zip(MASKS, model.blocks, strict=True))):  # the widest mask decides who holds what
        layer = block.attention
        problem = tw.Problem.of(
            heads=layer.heads, kv_heads=layer.kv_heads, head_dim=layer.head_dim, seqlen=length, dtype="float32", mask=mask
        )
        layer.plan = tw.distributed.plan(problem, group, shards=shards)
        shards = layer.plan.shards
    return model, layer.plan


def train(length: int, steps: int, group: Any) -> tuple[list[float], Rank]:
    """The loss of every step, the same on all processes, and this process's figures."""
    model, plan = make_model(length, group)
    text = torch.frombuffer(bytearray(repository_text()), dtype=torch.uint8).long()
    text = text.repeat(length // len(text) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    losses, kept, grown = [], 0, 0
    for step in range(steps):
        start = int(torch.randint(len(text) - length + 1, (), generator=generator))
        ids = plan.shard(text[start : start + length], 0)[None]  # this process's tokens
        targets = plan.shift(ids)  # the byte after each; the one after the last may be another process's
        forget_peak()
        before, counted = resident().now, Kept()
        with torch.autograd.graph.saved_tensors_hooks(counted.keep, lambda x: x):
            logits = model(ids)
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
        loss = tw.distributed.mean_loss(total, (targets != -100).sum(), group)
        optimizer.zero_grad()
        loss.backward()
        tw.distributed.average_gradients(model.parameters(), group)
        optimizer.step()
        losses.append(loss.item())
        kept = counted.bytes
        if step or steps == 1:  # kernels are compiled in the first
            grown = max(grown, resident().peak - before)
        bar(step + 1, steps, losses[-1], group)
    sent = sum(b.attention.plan.bytes_sent() + b.attention.plan.bytes_sent(backward=True) for b in model.blocks)
    return losses, Rank(plan.local_tokens(), kept, grown, sent)


class Kept:
    """Counts the bytes that autograd keeps for the backward pass, each once."""

    def __init__(self) -> None:
        self.bytes, self._seen = 0, set[int]()

    def keep(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return x


def bar(done: int, steps: int, loss: float, group: Any) -> None:
    if dist.get_rank(group) or not sys.stderr.isatty():
        return
    width = 30 * done // steps
    print(f"\r{'█' * width:░<30} {done}/{steps}  loss {loss:.3f}", end="\n" if done == steps else "", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens of the sequence")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    losses, own = train(options.length, options.steps, dist.group.WORLD)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(own))
    if dist.get_rank() == 0:
        report(options.length, losses, [Rank(*rank) for rank in everyone])
    dist.destroy_process_group()
    return losses


def report(length: int, losses: list[float], ranks: list[Rank]) -> None:
    mib = 2**20
    print(f"{length:,} tokens, {len(losses)} steps: loss {losses[0]:.3f} → {losses[-1]:.3f} nats a byte")
    print(f"{'rank':>6} {'tokens':>9} {'kept for gradients':>20} {'memory grows by':>17} {'sent a step':>13}")
    for number, rank in enumerate(ranks):
        kept, grown, sent = (size / mib for size in (rank.kept, rank.grown, rank.sent))
        print(f"{number:>6} {rank.tokens:>9,} {kept:>16.1f} MiB {grown:>13.1f} MiB {sent:>9.2f} MiB")
    print(f"{'all':>6} {length:>9,} {sum(rank.kept for rank in ranks) / mib:>16.1f} MiB")


if __name__ == "__main__":
    main()
