"""Lower bounds of the decay, one learned matrix for all layers that take them (HGRN-2)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from deltanet_jax.mixers.layers import param


class LowerBounds(nnx.Module):
  """gamma_l = sum_{1 <= j <= l} softmax(logits)_j over layers: 0 in the first and rising.

  Args:
    bounded: of each layer of the model, whether it takes a bound.
  """

  def __init__(self, bounded: list[bool], width: int):
    self.bounded = tuple(bounded)
    self.logits = param(jnp.zeros((sum(bounded), width)), None, "heads", decays=False)

  def __call__(self, units: list[tuple[int, int]]) -> list[list[Array | None]]:
    """The bounds `[times D]` of each block of each stack.

    Args:
      units: of each stack the layers that repeat, and how often.
    """
    shares = jax.nn.softmax(self.logits[...], axis=0)
    upto = np.tril(np.ones((shares.shape[0],) * 2))
    upto[:, 0] = 0
    with jax.default_matmul_precision("highest"):
      gamma = jnp.asarray(upto, shares.dtype) @ shares
    rows, bounds, first = np.cumsum(self.bounded) - 1, [], 0
    for size, times in units:
      layers = [first + i + size * np.arange(times) for i in range(size)]
      bounds.append([gamma[rows[at]] if self.bounded[at[0]] else None for at in layers])
      first += size * times
    return bounds
