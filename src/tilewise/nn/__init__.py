"""Modules: torch's MultiheadAttention on tilewise, and an attention layer for new models."""

from tilewise.nn.attention import Attention, KeyValueCache
from tilewise.nn.multihead import MultiheadAttention
from tilewise.nn.rotary import Rotary

__all__ = ["Attention", "KeyValueCache", "MultiheadAttention", "Rotary"]
