"""Causal convolutions as long as the sequence: of channels, or of keys by values per head."""

from deltanet_jax.ops.long_conv.api import long_conv, long_conv_attention

__all__ = ["long_conv", "long_conv_attention"]
