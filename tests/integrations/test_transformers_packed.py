"""Packed batches: sequences one after another in one row, told apart by `cu_seq_lens_q` and `cu_seq_lens_k`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.errors import ArgumentError
from tilewise.integrations.transformers import register
from tilewise.integrations.transformers.attention import attention_function

transformers = pytest.importorskip("transformers")

from tests.integrations.models import CASES, size  # noqa: E402  # it needs transformers

by_name = {case.name: case for case in CASES}
LENGTHS = (4, 1, 6)
ROUNDING = 32 * 2**-24  # two layers of a few dozen float32 roundings each


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def sequences() -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(2, 64, (n,), generator=g) for n in LENGTHS]


def packed(**options: Any) -> dict[str, Any]:
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt", **options)
    batch = dict(collator([{"input_ids": ids.tolist()} for ids in sequences()]))
    del batch["labels"]
    return batch


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_packed_sequences_are_those_alone(name: str, use_cache: bool) -> None:
    model = by_name[name].build("cpu", torch.float32)
    model.set_attn_implementation("tilewise")
    with torch.no_grad():
        got = model(**packed(), use_cache=use_cache).logits
        want = torch.cat([model(ids[None]).logits for ids in sequences()], dim=1)
    assert size(got - want) <= ROUNDING * size(want)


def test_packed_sequences_without_positions_are_told_apart_too() -> None:
    """Only the boundaries say where a sequence ends; positions count on, so rotary embeddings see their differences alone."""
    model = by_name["llama"].build("cpu", torch.float32)
    model.set_attn_implementation("tilewise")
    batch = packed(return_position_ids=False)
    with torch.no_grad():
        got = model(**batch).logits
        want = torch.cat([model(ids[None]).logits for ids in sequences()], dim=1)
    assert size(got - want) <= ROUNDING * size(want)


def test_cross_attention_over_packed_keys() -> None:
    """Queries and keys of other lengths, seen by their own sequence only."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 5, 8, generator=g), torch.randn(1, 2, 9, 8, generator=g)
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 6, 9])
    got, _ = attention_function(torch.nn.Module(), q, k, k, None, is_causal=False, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k)
    parts = [
        attention_function(torch.nn.Module(), q[:, :, a], k[:, :, b], k[:, :, b], None, is_causal=False)[0]
        for a, b in ((slice(2), slice(6)), (slice(2, 5), slice(6, 9)))
    ]
    assert torch.allclose(got, torch.cat(parts, dim=1), rtol=0, atol=16 * 2**-24)


def test_a_cache_that_holds_packed_tokens_is_refused() -> None:
    """Old keys of all sequences come before all new ones: the boundaries do not describe that."""
    model = by_name["llama"].build("cpu", torch.float32)
    model.set_attn_implementation("tilewise")
    batch = packed()
    with torch.no_grad():
        first = model(**batch, use_cache=True)
        with pytest.raises(ArgumentError, match="cu_seq_lens_k"):
            model(**batch, past_key_values=first.past_key_values)


@pytest.mark.parametrize(
    ("features", "complaint"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4])}, "cu_seq_lens_q: ends at 4"),
        ({"cu_seq_lens_q": torch.tensor([0, 5]), "cu_seq_lens_k": torch.tensor([0, 2, 5])}, "2 sequences"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 2, 5])}, "must not fall"),
        ({"cu_seq_lens_q": torch.tensor([[0, 5]])}, "one dimension"),
        ({"cu_seq_lens_k": torch.tensor([0, 5])}, "need both"),
    ],
)
def test_boundaries_that_do_not_fit_raise(features: dict[str, Any], complaint: str) -> None:
    x = torch.zeros(1, 1, 5, 4)
    with pytest.raises(ArgumentError, match=complaint):
        attention_function(torch.nn.Module(), x, x, x, None, **features)


def test_boundaries_need_one_row() -> None:
    x = torch.zeros(2, 1, 5, 4)
    with pytest.raises(ArgumentError, match="batch of 2"):
        attention_function(torch.nn.Module(), x, x, x, None, cu_seq_lens_q=torch.tensor([0, 5]))
