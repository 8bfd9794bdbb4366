"""A small server loop with continuous batching: requests join and leave a batch while others go on. Runs on a CPU in seconds.

    python examples/serve.py --requests 24 --batch 6

A page allocator of fifteen lines, one layer with random weights, and one attention call a step for prompts and tokens alike.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from torch import nn

import tilewise as tw


class Allocator:
    """Which page belongs to whom."""

    def __init__(self, pages: int, page: int) -> None:
        self.free, self.page = list(range(pages)), page

    def grow(self, owned: list[int], tokens: int) -> bool:
        """Give a request pages for so many tokens; False if there are too few."""
        wanted = -(-tokens // self.page) - len(owned)
        if wanted > len(self.free):
            return False
        owned += [self.free.pop() for _ in range(wanted)]
        return True


class Request:
    def __init__(self, prompt: list[int], new: int) -> None:
        self.tokens, self.done, self.end = prompt, 0, len(prompt) + new
        self.pages: list[int] = []


class Model(nn.Module):
    """One layer: enough to generate something from."""

    def __init__(self, vocabulary: int = 256, dim: int = 128, heads: int = 8, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.embed = nn.Embedding(vocabulary, dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, vocabulary, bias=False)
        angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.rotary = tw.rotary(angles.cos(), angles.sin())

    def forward(self, tokens: torch.Tensor, cache: tw.KVCache, cu: torch.Tensor) -> torch.Tensor:
        """The most likely next token of each sequence; `tokens` are those the cache does not hold yet, packed."""
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (sum(sizes), self.head_dim)).split(sizes, dim=-2)
        out = tw.attention_cached(q, cache, new=(k, v), rotary=self.rotary, cu_seqlens_q=cu)
        return self.out(out.flatten(-2)[cu[1:].long() - 1]).argmax(-1)


def serve(model: Model, waiting: list[Request], batch: int, pages: int, page: int) -> list[Request]:
    """Run all requests to their end; prints tokens per second."""
    allocator, running, finished = Allocator(pages, page), [], []
    shape = (pages, page, model.kv_heads, model.head_dim)
    k_pages, v_pages = (torch.zeros(shape, dtype=model.out.weight.dtype) for _ in "kv")
    begin, steps, generated = time.perf_counter(), 0, 0
    while waiting or running:
        while waiting and len(running) < batch and allocator.grow(waiting[0].pages, waiting[0].end):
            running.append(waiting.pop(0))
        if not running:
            raise RuntimeError("a request needs more pages than there are")
        fresh = [request.tokens[request.done :] for request in running]
        most = max(len(request.pages) for request in running)
        table = torch.tensor([request.pages + [-1] * (most - len(request.pages)) for request in running], dtype=torch.int32)
        lengths = torch.tensor([len(request.tokens) for request in running], dtype=torch.int32)
        cu = torch.tensor([0, *map(len, fresh)]).cumsum(0).int()
        cache = tw.KVCache.paged(k_pages, v_pages, table, lengths)
        following = model(torch.tensor([token for one in fresh for token in one]), cache, cu).tolist()
        for request, token in zip(running, following, strict=True):
            request.done = len(request.tokens)
            request.tokens.append(token)
        generated, steps = generated + len(running), steps + 1
        for request in [one for one in running if len(one.tokens) >= one.end]:
            running.remove(request)
            finished.append(request)
            allocator.free += request.pages
        rate = generated / (time.perf_counter() - begin)
        print(f"\rstep {steps}: {len(running)} running, {len(waiting)} waiting, {rate:,.0f} tokens/s", end="", flush=True)
    print()
    return finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--batch", type=int, default=6, help="sequences that run at once")
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--page", type=int, default=16, help="tokens of a page")
    options = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(4, 120))] for _ in range(options.requests)]
    requests = [Request(prompt, rng.randint(4, 40)) for prompt in prompts]
    with torch.no_grad():
        finished = serve(Model(), requests, options.batch, options.pages, options.page)
    print(f"{len(finished)} requests, {sum(len(one.tokens) for one in finished)} tokens")


if __name__ == "__main__":
    main()
