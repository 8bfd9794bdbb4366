"""Continuous batching: requests that come and go in one batch give the tokens that `eager` gives each alone."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import (
    ContinuousBatchingConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from tilewise.errors import ArgumentError
from tilewise.integrations.transformers import continuous, register

TOKENS = 12
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, sliding_window=8, layer_types=LAYERS, attn_logit_softcapping=5.0, query_pre_attn_scalar=16)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, sliding_window=8, layer_types=LAYERS, num_local_experts=2, num_experts_per_tok=1)
    ),
}

newer = pytest.mark.skipif(
    "write_index" in signature(PagedAttentionCache.update).parameters, reason="this transformers asks its cache in another way"
)


def make(kind: str) -> Any:
    torch.manual_seed(0)
    return MODELS[kind]().eval().float()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that were served."""
    layers: list[int] = []
    own = continuous.attention_varlen

    def counted(*args: Any, **options: Any) -> Any:
        layers.append(1)
        return own(*args, **options)

    monkeypatch.setattr(continuous, "attention_varlen", counted)
    return layers


@newer
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_eager(kind: str, served: list[int]) -> None:
    """Windows, softcap and sinks; more requests than a batch takes, prompts longer than one, one of a single token."""
    register()
    model = make(kind)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 128, (n,), generator=draw).tolist() for n in (5, 40, 1, 17)]
    model.set_attn_implementation("eager")
    alone = {"max_new_tokens": TOKENS, "do_sample": False}
    want = [model.generate(torch.tensor([one]), **alone)[0, len(one) :].tolist() for one in prompts]
    model.set_attn_implementation("tilewise_flash")
    assert model.config._attn_implementation == "tilewise_flash"  # also where a model lists the packages it goes with
    done = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=24),
        progress_bar=False,
    )
    assert [one.generated_tokens for one in done.values()] == want
    assert len(served) >= 2 * TOKENS and len(served) % 2 == 0  # both layers, every step


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["tilewise", "tilewise_flash"])
def test_the_name_serves_everything_else_too(name: str, cache: str) -> None:
    register()
    model = make("gpt_oss")
    prompts = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(2))
    padding = torch.ones_like(prompts)
    padding[0, :4] = 0
    options = {"attention_mask": padding, "max_new_tokens": TOKENS, "do_sample": False, "cache_implementation": cache}
    model.set_attn_implementation("eager")
    want = model.generate(prompts, **options)
    model.set_attn_implementation(name)
    assert torch.equal(model.generate(prompts, **options), want)


def test_block_tables_are_refused() -> None:
    register()
    layer = make("llama").model.layers[0].self_attn
    x, given = torch.zeros(1, 2, 3, 16), {"cache": {}, "cu_seq_lens_q": None, "block_table": torch.zeros(1, 1, 1)}
    with pytest.raises(ArgumentError, match="max_blocks_per_request=0"):
        continuous.attend_packed(layer, x, x, x, 1.0, given)
