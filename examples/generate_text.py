"""Write text with the tiny GPT, one byte at a time over a cache of keys and values.

    python examples/generate_text.py --model gpt.pt --prompt "def attention("

Without --model it trains for a moment first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from tiny_gpt import fresh, repository_text, train


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="weights left by train_tiny_gpt.py --save")
    parser.add_argument("--prompt", default='"""Exact attention')
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest byte")
    parser.add_argument("--steps", type=int, default=150, help="of training, where there is no model")
    options = parser.parse_args(arguments)
    model = fresh()
    if options.model:
        model.load_state_dict(torch.load(options.model))
    else:
        losses = train(model, repository_text(), options.steps)
        print(f"trained for {options.steps} steps: {losses[0]:.2f} → {losses[-1]:.2f} nats a byte\n")
    prompt = options.prompt.encode()
    text = (prompt + model.eval().write(prompt, options.length, options.temperature)).decode(errors="replace")
    print(text)
    return text


if __name__ == "__main__":
    main()
