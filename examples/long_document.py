"""Encode one document of 32,768 tokens on a CPU in bounded memory: local layers, and one in which every token sees all others.

    python examples/long_document.py

The scores of the global layer alone would take 8.6 GB; they never exist.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from tiny_gpt import repository_text
from torch import Tensor, nn

import tilewise as tw
from tilewise.lab.bench.memory import forget_peak, resident
from tilewise.nn import Attention


class Encoder(nn.Module):
    """Bytes to one vector: two layers with a window of 128 tokens to each side, then one over the whole document."""

    def __init__(self, dim: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, dim)
        masks = (tw.window(128, 128), tw.window(128, 128), tw.full())
        self.layers = nn.ModuleList(Attention(dim, heads, mask=mask) for mask in masks)
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in masks)
        self.heads = heads

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x.mean(dim=1)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args(arguments)
    text = repository_text()
    text = (text * (options.tokens // len(text) + 1))[: options.tokens]
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None]
    torch.manual_seed(0)
    encoder = Encoder().eval()
    with torch.no_grad():
        encoder(ids[:, :256])  # kernels are compiled and threads started before anything is measured
        forget_peak()
        before = resident().now
        start = time.perf_counter()
        vector = encoder(ids)
        seconds = time.perf_counter() - start
    grown = max(resident().peak - before, 0)
    scores = encoder.heads * options.tokens**2 * 4
    print(
        f"{options.tokens:,} tokens → a vector of {vector.shape[1]}, norm {float(vector.norm()):.3f}, in {seconds:.1f} s"
    )
    print(f"memory grew by {grown / 2**20:,.0f} MiB at its peak; one matrix of scores is {scores / 2**20:,.0f} MiB")
    return {"seconds": seconds, "grown": grown, "scores": scores, "norm": float(vector.norm())}


if __name__ == "__main__":
    main()
