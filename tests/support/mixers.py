"""Every mixer at a tiny size; a new mixer adds a line here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deltanet_jax import config
from deltanet_jax.mixers import build_mixer

# Two whole chunks and a token.
B, L, D, CHUNK = 2, 9, 16, 4

_SMALL = dict(heads=2, key_size=8, value_size=12, chunk=CHUNK)
CASES = {
  "deltanet": config.DeltaNetConfig(**_SMALL),
  "deltanet_original": config.DeltaNetConfig(
    activation="elu", norm="l1", conv=0, output_gate=True, **_SMALL
  ),
  "deltanet_negative": config.DeltaNetConfig(
    activation="relu", negative_eigenvalues=True, **_SMALL
  ),
  "gated_deltanet": config.GatedDeltaNetConfig(**_SMALL),
  "attention": config.AttentionConfig(head_size=8),
  "window": config.AttentionConfig(head_size=4, window=3),
  "window_grouped": config.AttentionConfig(head_size=4, kv_heads=2, window=2 * L),
  "retnet": config.RetNetConfig(heads=2, chunk=CHUNK),
  "gla": config.GLAConfig(heads=2, chunk=CHUNK),
  "gla_conv": config.GLAConfig(heads=2, chunk=CHUNK, conv=4),
  "mamba": config.MambaConfig(state_size=4, chunk=CHUNK),
  "mamba_noconv": config.MambaConfig(state_size=4, chunk=CHUNK, conv=0),
}


@functools.cache
def make(name: str, dtype: str = "float64"):
  """The mixer with weights large enough to matter, and an input."""
  rng = np.random.default_rng(0)
  mixer = jax.eval_shape(lambda: build_mixer(CASES[name], D, rngs=nnx.Rngs(params=0)))
  # Drawn by NumPy: initialisers take seconds to compile.
  draw = lambda x: jnp.asarray((x.ndim == 1) + 0.3 * rng.standard_normal(x.shape), dtype)
  return jax.tree.map(draw, mixer), jnp.asarray(rng.standard_normal((B, L, D)), dtype)
