"""Feature maps of linear attention: phi(x) for a query or key x of one head."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from deltanet_jax.mixers.layers import Linear, param
from deltanet_jax.ops.dtypes import upcast
from deltanet_jax.sharding import locally

FeatureName = Literal["identity", "elu", "relu", "t2r", "hadamard", "hedgehog", "dpfp", "taylor"]
# Normalizers are sums whose terms must not cancel. Feature maps with negative features, and those
# for which phi(q) phi(k) may be negative as well.
SIGNED_FEATURES = ("identity", "hadamard", "taylor")
SIGNED_PRODUCTS = ("identity", "hadamard")

_HEADS = ("batch", "length", "heads", None)


class FeatureMap(nnx.Module):
  """phi(x) over the last axis, with weights shared by all heads.

  identity  x
  elu       1 + elu(x)
  relu      relu(x)
  t2r       relu(x W)
  hadamard  (x W_1 + b_1) * (x W_2 + b_2)
  hedgehog  softmax([2 u, -2 u]), u = x W + b, initially x
  dpfp      r * roll(r, j) for j = 1 .. nu, r = [relu(x), relu(-x)]
  taylor    exp to second order: phi(x) phi(y) = 1 + s + s^2 / 2, s = x y / sqrt(d)
  """

  def __init__(self, name: FeatureName, size: int, *, nu: int, std: float, rngs):
    self.name, self.nu = name, nu
    self.size = {
      "hedgehog": 2 * size,
      "dpfp": 2 * size * nu,
      "taylor": 1 + 2 * size + size * (size - 1) // 2,
    }.get(name, size)
    make = lambda bias: Linear((size, size), (None, None), std=std, rngs=rngs, bias=bias)
    self.first = make(name != "t2r") if name in ("t2r", "hadamard", "hedgehog") else None
    self.second = make(True) if name == "hadamard" else None
    if name == "hedgehog":
      self.first.kernel = param(jnp.eye(size), None, None)

  def flops(self) -> int:
    """FLOPs of the matmuls with its weights, for one query or key of one head."""
    return sum(2 * x.kernel.size for x in (self.first, self.second) if x is not None)

  def __call__(self, x: Float[Array, "B L H d"]) -> Float[Array, "B L H f"]:
    # Under shard_map, each device for its own heads: where the sharding changes from tokens to
    # heads, the compiler sums the gradient of shared weights over the wrong mesh axes.
    weights, treedef = jax.tree.flatten(self)
    run = lambda x, *weights: (jax.tree.unflatten(treedef, weights).features(x),)
    names = (_HEADS, *((None,) * w.ndim for w in weights))
    (y,) = locally(run, (x, *weights), names, (_HEADS,))
    return y

  def features(self, x):
    """phi(x) on one device."""
    match self.name:
      case "identity":
        return x
      case "elu":
        return 1 + jax.nn.elu(x)
      case "relu":
        return jax.nn.relu(x)
      case "t2r":
        return jax.nn.relu(self.first(x))
      case "hadamard":
        return self.first(x) * self.second(x)
      case "hedgehog":
        u = upcast(self.first(x))
        return jax.nn.softmax(2 * jnp.concatenate([u, -u], axis=-1), axis=-1).astype(x.dtype)
      case "dpfp":
        r = jax.nn.relu(jnp.concatenate([x, -x], axis=-1))
        return jnp.concatenate([r * jnp.roll(r, j + 1, axis=-1) for j in range(self.nu)], axis=-1)
      case "taylor":
        d = x.shape[-1]
        i, j = np.triu_indices(d, 1)
        terms = [x * d**-0.25, x * x * (2 * d) ** -0.5, x[..., i] * x[..., j] * d**-0.5]
        return jnp.concatenate([jnp.ones_like(x[..., :1]), *terms], axis=-1)
      case _:
        raise ValueError(f"feature_map is {self.name!r}, expected one of {get_args(FeatureName)}.")
