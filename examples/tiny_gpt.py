"""A small GPT over bytes, built from `tilewise.nn.Attention`; the other examples train it and write with it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw
from tilewise.nn import Attention, KeyValueCache

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = 128


def repository_text() -> bytes:
    """The text to learn: this repository's own documents and sources, in a fixed order."""
    files = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("src/**/*.py"))]
    return b"\n\n".join(path.read_bytes() for path in files if path.is_file())


class EagerAttention(Attention):
    """The same layer the usual way: all scores at once. It is here to be compared with."""

    def forward(self, x: Tensor, *, cache: KeyValueCache | None = None) -> Tensor:  # type: ignore[override]
        split = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv(x).unflatten(-1, (sum(split), self.head_dim)).split(split, dim=-2)
        positions = torch.arange(x.shape[1], device=x.device)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.mT / math.sqrt(self.head_dim)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kind: type[Attention]) -> None:
        super().__init__()
        self.attention = kind(dim, heads, kv_heads=heads // 2, mask=tw.causal())
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.before, self.between = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = x + self.attention(self.before(x), cache=cache)
        return x + self.feed(self.between(x))


class TinyGPT(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 4, layers: int = 2, kind: type[Attention] = Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kind) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, ids: Tensor, caches: list[KeyValueCache] | None = None) -> Tensor:
        """Logits (B, S, 256) of the byte after each; with caches, of `ids` that continue what they hold."""
        x = self.tokens(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        return self.head(self.norm(x))

    @torch.no_grad()
    def write(self, prompt: bytes, length: int, temperature: float = 0.0, *, cached: bool = True) -> bytes:
        """`length` more bytes. Each step computes one position and attends to the cached ones, or computes all again."""
        ids = torch.tensor([list(prompt)])
        caches = [KeyValueCache() for _ in self.blocks] if cached else None
        new = ids
        for _ in range(length):
            logits = self(new if cached else ids, caches)[:, -1]
            if temperature:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            else:
                new = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], dim=1)
        return bytes(ids[0, len(prompt) :].tolist())


def train(model: TinyGPT, text: bytes, steps: int, batch: int = 8, seed: int = 0) -> list[float]:
    """The loss at every step, in nats a byte."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        start = torch.randint(len(data) - CONTEXT - 1, (batch,), generator=g)
        window = torch.stack([data[i : i + CONTEXT + 1] for i in start.tolist()])  # (B, CONTEXT + 1)
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def fresh(kind: type[Attention] = Attention, dtype: torch.dtype = torch.float32) -> TinyGPT:
    """The model before training, the same for every kind of attention."""
    torch.manual_seed(0)
    return TinyGPT(kind=kind).to(dtype)
