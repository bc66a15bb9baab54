"""Small models with random weights from NumPy: initializers take seconds to compile."""

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.config import ModelConfig
from deltanet_jax.models import LM
from deltanet_jax.models.build import abstract


def random_model(cfg: ModelConfig, dtype: str = "float32", std: float = 0.1) -> LM:
  """Return a model with normal weights of mean 0, and scales of norms with mean 1."""
  rng = np.random.default_rng(0)
  model = abstract(cfg)
  mean = lambda path: float("scale" in jax.tree_util.keystr(path))
  draw = lambda path, x: jnp.asarray(mean(path) + std * rng.standard_normal(x.shape), dtype)
  return jax.tree_util.tree_map_with_path(draw, model)
