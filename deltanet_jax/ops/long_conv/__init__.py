"""Causal convolutions as long as the sequence: per channel, or of outer products k (x) v."""

from deltanet_jax.ops.long_conv.api import long_conv, long_conv_attention

__all__ = ["long_conv", "long_conv_attention"]
