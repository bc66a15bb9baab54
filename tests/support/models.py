"""Small models with weights drawn by NumPy: initialisers take seconds to compile."""

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.config import ModelConfig
from deltanet_jax.models import LM
from deltanet_jax.models.build import abstract


def random_model(cfg: ModelConfig, dtype: str = "float32", std: float = 0.1) -> LM:
  """Weights normal around 0, those of vectors around 1."""
  rng = np.random.default_rng(0)
  model = abstract(cfg)
  vector = lambda path, x: "scale" in jax.tree_util.keystr(path)
  draw = lambda path, x: jnp.asarray(vector(path, x) + std * rng.standard_normal(x.shape), dtype)
  return jax.tree_util.tree_map_with_path(draw, model)
