"""Epilogue of a q, k or v projection: an activation, then a per-head norm."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from deltanet_jax.ops.norms import EPS, l1_norm, l2_norm

Activation = Literal["silu", "relu", "elu", "identity"]
Norm = Literal["l2", "l1"]
_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "relu": jax.nn.relu,
  "elu": lambda x: 1 + jax.nn.elu(x),
  "identity": lambda x: x,
}
_NORMS = {"l2": l2_norm, "l1": l1_norm}


@dataclasses.dataclass(frozen=True)
class Epilogue:
  """Computes norm(activation(y)) for each head of `size` channels; "elu" is 1 + elu."""

  activation: Activation = "identity"
  norm: Norm | None = None
  size: int | None = None  # channels of a head; None where there are no heads

  def activate(self, y: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return _ACTIVATIONS[self.activation](y)

  def normalize(self, y: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return y if self.norm is None else _NORMS[self.norm](y, self.size)

  def __call__(self, y: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return self.normalize(self.activate(y))

  def in_kernel(self, y, total):
    """Apply the epilogue inside a kernel, where total(x) sums the channels of each head."""
    y = self.activate(y)
    if self.norm == "l2":
      return y * lax.rsqrt(total(y * y) + EPS)
    return y if self.norm is None else y / (total(jnp.abs(y)) + EPS)


IDENTITY = Epilogue()
