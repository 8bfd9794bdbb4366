"""Greedy tokens of a small model with random weights, by vLLM with one of its attention backends, as JSON.

    python -m tests.vllm.generate FOLDER make llama            writes the model
    python -m tests.vllm.generate FOLDER CUSTOM tokens.json    reads it; the backend is CUSTOM or CPU_ATTN

`tools/test_vllm.py` runs it in an environment with vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

VOCABULARY = 512


def make_model(kind: str, folder: Path) -> None:
    """Weights and configuration of a small model, the same in every run."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "dtype": "float32",
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2, tie_word_embeddings=False))
    else:  # a window in every other layer, capped scores
        model = Gemma2ForCausalLM(
            Gemma2Config(**sizes, initializer_range=0.2, sliding_window=32, attn_logit_softcapping=5.0, query_pre_attn_scalar=32)
        )
    model.float().save_pretrained(folder)


def prompts(count: int) -> list[list[int]]:
    """Prompts of unlike lengths; every fourth begins like the one before, so that blocks are shared."""
    draw = random.Random(0)
    made: list[list[int]] = []
    for i in range(count):
        own = [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, 90))]
        made.append(made[-1][:64] + own[:20] if i % 4 == 3 else own)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the model")
    parser.add_argument("backend", help="or `make`")
    parser.add_argument("out", help="where the tokens go, or the model to make")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    if given.backend == "make":
        return make_model(given.out, given.folder)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(given.folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256, seed=0,
        max_num_batched_tokens=512, max_num_seqs=32, attention_config={"backend": given.backend},
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True, detokenize=False)
    done = engine.generate([{"prompt_token_ids": one} for one in prompts(given.prompts)], sampling, use_tqdm=False)
    served: dict[str, int] = {}
    if given.backend == "CUSTOM":
        from tilewise.integrations.vllm_backend import SERVED

        served = dict(SERVED)
    tokens = [list(one.outputs[0].token_ids) for one in done]
    layers = json.loads((given.folder / "config.json").read_text())["num_hidden_layers"]
    Path(given.out).write_text(json.dumps({"tokens": tokens, "served": served, "layers": layers}))


if __name__ == "__main__":
    main()
