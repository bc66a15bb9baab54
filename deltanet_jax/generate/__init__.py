"""Text generation: sampling and the decoding loop."""

from deltanet_jax.generate.loop import generate
from deltanet_jax.generate.sample import Sampling, sample

__all__ = ["Sampling", "generate", "sample"]
