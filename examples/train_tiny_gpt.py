"""Train a tiny GPT on this repository's text, once with tilewise and once with plain attention: the same curve.

python examples/train_tiny_gpt.py --steps 150 --save gpt.pt
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from tiny_gpt import EagerAttention, fresh, repository_text, train


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--save", help="where to leave the weights trained with tilewise")
    options = parser.parse_args(arguments)
    text = repository_text()
    print(f"{len(text):,} bytes of text, {options.steps} steps")
    start = time.perf_counter()
    model = fresh()
    curves = {"tilewise": train(model, text, options.steps)}
    middle = time.perf_counter()
    curves["plain"] = train(fresh(EagerAttention), text, options.steps)
    end = time.perf_counter()
    print(f"{'step':>6} {'tilewise':>10} {'plain':>10}   nats a byte")
    for step in sorted({*range(0, options.steps, max(options.steps // 8, 1)), options.steps - 1}):
        print(f"{step:>6} {curves['tilewise'][step]:>10.4f} {curves['plain'][step]:>10.4f}")
    print(f"tilewise {middle - start:.1f} s, plain attention {end - middle:.1f} s")
    if options.save:
        torch.save(model.state_dict(), options.save)
        print(f"weights in {options.save}")
    return curves


if __name__ == "__main__":
    main()
