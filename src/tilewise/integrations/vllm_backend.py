"""vLLM's attention backend: its blocks are views of pages, its metadata the arguments of `attention_cached`.

Written for vLLM 0.32, whose contract for backends is not stable: `make test-vllm` says whether it still holds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType

from tilewise.api.bias import alibi
from tilewise.api.cache import KVCache
from tilewise.api.cached import attention_cached
from tilewise.errors import ArgumentError
from tilewise.masks import causal, window

SERVED: Counter[str] = Counter()
"""How often each layer was served in this process, by its name."""


class TilewiseBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks before it chooses a backend."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilewiseImpl]:
        return TilewiseImpl

    @staticmethod
    def get_builder_cls() -> type[TilewiseMetadataBuilder]:
        return TilewiseMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= 512

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


@dataclass
class TilewiseMetadata:
    """The batch of one step."""

    tokens: int  # without padding
    cu_q: Tensor
    lengths: Tensor
    table: Tensor


class TilewiseMetadataBuilder(AttentionMetadataBuilder[TilewiseMetadata]):  # type: ignore[misc]
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TilewiseMetadata:
        batch = common_attn_metadata
        if batch.causal is not True:
            raise ArgumentError("causal: this batch is not causal throughout, which backend CUSTOM (tilewise) does not offer")
        rows = slice(batch.num_reqs)
        return TilewiseMetadata(
            tokens=batch.num_actual_tokens,
            cu_q=batch.query_start_loc[: batch.num_reqs + 1],
            lengths=batch.seq_lens[rows],
            table=batch.block_table_tensor[rows],
        )


class TilewiseImpl(AttentionImpl[TilewiseMetadata]):  # type: ignore[misc]
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise ArgumentError(f"attn_type: got {attn_type!r}; backend CUSTOM (tilewise) serves decoders")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.softcap = float(logits_soft_cap or 0.0)
        self.bias = None if alibi_slopes is None else alibi(torch.tensor(alibi_slopes, dtype=torch.float32))
        self.mask = causal() if sliding_window is None else causal() & window(sliding_window)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TilewiseMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise ArgumentError("output_scale: backend CUSTOM (tilewise) does not quantise what it returns")
        if attn_metadata is None:  # vLLM measures memory
            return output
        batch = attn_metadata
        cache = KVCache.paged(*_pages(kv_cache), batch.table, batch.lengths)
        attention_cached(
            query[: batch.tokens],
            cache,
            cu_seqlens_q=batch.cu_q,
            mask=self.mask,
            scale=self.scale,
            bias=self.bias,
            softcap=self.softcap,
            sinks=self.sinks,
            out=output[: batch.tokens].view(batch.tokens, self.num_heads, self.head_size),
        )
        SERVED[layer.layer_name] += 1
        return output

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        k, v = _pages(kv_cache)
        nobody = torch.zeros((1, 1), dtype=torch.int32, device=k.device)
        tokens = slot_mapping.shape[0]
        KVCache.paged(k, v, nobody, nobody[0]).append(key[:tokens], value[:tokens], slots=slot_mapping)


def _pages(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks (blocks, Hk, block, 2 · D), keys and values side by side, as two views (blocks, block, Hk, D)."""
    keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return keys, values
