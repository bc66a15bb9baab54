"""Causal softmax attention: whole sequences, and new tokens against a cache of old ones."""

from deltanet_jax.ops.attention.api import causal_attention
from deltanet_jax.ops.attention.cache import Cache, cached_attention, init_cache

__all__ = ["Cache", "cached_attention", "causal_attention", "init_cache"]
