"""Decayed linear attention: recurrent and chunkwise."""

from deltanet_jax.ops.linear_attention.api import linear_attention, linear_attention_step

__all__ = ["linear_attention", "linear_attention_step"]
