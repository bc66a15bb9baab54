"""How good a model is, and what it is compared with."""

from deltanet_jax.eval.ngram import bits_per_byte

__all__ = ["bits_per_byte"]
