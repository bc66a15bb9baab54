"""HGRN-2's lower bounds of the decay: one learned matrix for all HGRN-2 layers of a model."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from deltanet_jax.mixers.layers import param


class LowerBounds(nnx.Module):
  """gamma_l = sum_{1 <= j <= l} softmax(logits)_j over layers: 0 in the first layer, then rising.

  Args:
    bounded: for each layer of the model, whether its mixer takes a bound.
  """

  def __init__(self, bounded: list[bool], width: int):
    self.bounded = tuple(bounded)
    self.logits = param(jnp.zeros((sum(bounded), width)), None, "heads", decays=False)

  def __call__(self, units: list[tuple[int, int]]) -> list[list[Array | None]]:
    """Return the bounds `[times D]`, or None, of each block of each stack.

    Args:
      units: (blocks per unit, repetitions) of each stack.
    """
    shares = jax.nn.softmax(self.logits[...], axis=0)
    cumulative = np.tril(np.ones((shares.shape[0],) * 2))
    cumulative[:, 0] = 0
    with jax.default_matmul_precision("highest"):
      gamma = jnp.asarray(cumulative, shares.dtype) @ shares
    rows, bounds, first = np.cumsum(self.bounded) - 1, [], 0
    for size, times in units:
      layers = [first + i + size * np.arange(times) for i in range(size)]
      bounds.append([gamma[rows[at]] if self.bounded[at[0]] else None for at in layers])
      first += size * times
    return bounds
