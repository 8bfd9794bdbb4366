"""Swap the attention of an existing transformers model: one line, the same logits and the same tokens.

    python examples/swap_attention.py

The model is a small Mistral of random weights, so that nothing is downloaded; a pretrained one is swapped in the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM

from tilewise.integrations.transformers import use_tilewise


def small_mistral() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=32,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=None,
        attn_implementation="eager",
    )
    return MistralForCausalLM(config).eval()


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    model = small_mistral()
    ids = torch.randint(1, 256, (2, 80), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[0, :13] = 0  # the first sequence is shorter: padded on the left
    found: dict[str, Any] = {}
    for name in ("eager", "tilewise"):
        if name == "tilewise":
            use_tilewise(model)  # the one line
        with torch.no_grad():
            logits = model(ids, attention_mask=padding).logits[padding.bool()]
            tokens = model.generate(ids, attention_mask=padding, max_new_tokens=24, do_sample=False)[:, ids.shape[1] :]
        found[name] = (logits, tokens)
        print(f"{name:>9}: {tokens[0].tolist()}")
    apart = float((found["eager"][0] - found["tilewise"][0]).abs().max())
    same = torch.equal(found["eager"][1], found["tilewise"][1])
    print(
        f"logits apart by at most {apart:.1e} (largest logit {float(found['eager'][0].abs().max()):.1f}); same tokens: {same}"
    )
    return {"apart": apart, "same": same, "largest": float(found["eager"][0].abs().max())}


if __name__ == "__main__":
    main()
