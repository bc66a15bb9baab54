"""Causal softmax attention: on sequences, and of new tokens against a KV cache."""

from deltanet_jax.ops.attention.api import causal_attention
from deltanet_jax.ops.attention.cache import Cache, cached_attention, init_cache

__all__ = ["Cache", "cached_attention", "causal_attention", "init_cache"]
