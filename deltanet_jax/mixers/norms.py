"""LayerNorm of the residual stream and of heads."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from deltanet_jax.mixers.layers import merge_heads, param, split_heads
from deltanet_jax.ops import layer_norm
from deltanet_jax.sharding import locally


class LayerNorm(nnx.Module):
  """scale (x - mean) / sqrt(variance + eps) + bias over the last axis."""

  def __init__(self, size, axis, *, eps):
    self.scale, self.bias = param(jnp.ones(size), axis), param(jnp.zeros(size), axis)
    self.eps = eps

  def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return layer_norm(x, self.scale[...], self.bias[...], self.eps)


class HeadLayerNorm(nnx.Module):
  """LayerNorm of every head, with a scale, and if asked for a bias, per channel of each."""

  def __init__(self, heads, size, *, eps, bias, scale=1.0):
    self.scale = param(jnp.full(heads * size, scale), "heads")
    self.bias = param(jnp.zeros(heads * size), "heads") if bias else None
    self.size, self.eps = size, eps

  def __call__(self, o: Float[Array, "B L H dv"]) -> Float[Array, "B L d"]:
    def run(o, scale, bias):
      flat = lambda y: None if y is None else y.reshape(-1)
      y = layer_norm(merge_heads(o), flat(scale), flat(bias), self.eps, self.size)
      return (split_heads(y, o.shape[2]),)

    # By each device for its own heads, none cut in two.
    heads = ("batch", "length", "heads", None)
    of_heads = lambda w: None if w is None else w[...].reshape(-1, self.size)
    arguments = (o, of_heads(self.scale), of_heads(self.bias))
    (y,) = locally(run, arguments, (heads, heads[2:], heads[2:]), (heads,))
    return merge_heads(y)
