"""Autoencoder: predict all tokens of a sequence from its last hidden state (MAD's compression)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from deltanet_jax.config import ModelConfig
from deltanet_jax.mixers.layers import Linear
from deltanet_jax.models.block import make_norm


def sinusoids(length: int, width: int) -> np.ndarray:
  """Return sines, then cosines, of i 10000^(-j / (width/2 - 1)) at position i: `[length width]`."""
  rates = 10000.0 ** (-np.arange(width // 2) / (width // 2 - 1))
  angles = np.arange(length)[:, None] * rates
  return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


class Decoder(nnx.Module):
  """x_i = f(.. f(x_L + p_i)), f(x) = gelu(W norm(x) + b), p_i sinusoidal position embeddings."""

  def __init__(self, cfg: ModelConfig, *, rngs):
    self.norms = nnx.List([make_norm(cfg) for _ in range(cfg.autoencoder)])
    shape = dict(shape=(cfg.width, cfg.width), axes=("embed", None))
    make = lambda: Linear(**shape, std=cfg.init_std, rngs=rngs, bias=True)
    self.layers = nnx.List([make() for _ in range(cfg.autoencoder)])

  def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
    y = x[:, -1:] + jnp.asarray(sinusoids(*x.shape[1:]), x.dtype)[None]
    for norm, layer in zip(self.norms, self.layers):
      y = jax.nn.gelu(layer(norm(y)), approximate=False)
    return y
