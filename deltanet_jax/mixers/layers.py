"""Small modules that mixers and models are made of; weights carry the names of their axes."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from deltanet_jax.ops import rms_norm, short_conv


def param(value: Array, *axes: str | None) -> nnx.Param:
  """A float32 weight with one logical axis name per dimension (None: never sharded)."""
  assert value.ndim == len(axes), (value.shape, axes)
  return nnx.Param(value.astype(jnp.float32), axes=axes)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> Array:
  return std * jax.random.normal(rngs.params(), shape, jnp.float32)


class Linear(nnx.Module):
  """x W (+ b) in x's dtype."""

  def __init__(self, shape, axes, *, std, rngs, bias=False):
    self.kernel = param(normal(rngs, shape, std), *axes)
    self.bias = param(jnp.zeros(shape[1]), axes[1]) if bias else None

  def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
    y = x @ self.kernel[...].astype(x.dtype)
    if self.bias is None:
      return y
    bias = self.bias[...].astype(x.dtype)
    return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


class RMSNorm(nnx.Module):
  """scale x / sqrt(mean(x^2) + eps) over the last axis."""

  def __init__(self, size, axis, *, eps):
    self.scale = param(jnp.ones(size), axis)
    self.eps = eps

  def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return rms_norm(x, self.scale[...], self.eps)


class ShortConv(nnx.Module):
  """Causal convolution of a few tokens, one filter per channel."""

  def __init__(self, width, channels, axis, *, std, rngs, bias=False):
    self.kernel = param(normal(rngs, (width, channels), std), None, axis)
    self.bias = param(jnp.zeros(channels), axis) if bias else None

  def __call__(
    self,
    x: Float[Array, "B L d"],
    state: Float[Array, "B W d"] | None,
    segment_ids: Int[Array, "B L"] | None,
  ) -> tuple[Float[Array, "B L d"], Float[Array, "B W d"]]:
    bias = None if self.bias is None else self.bias[...]
    return short_conv(x, self.kernel[...], bias=bias, state=state, segment_ids=segment_ids)

  def init_state(self, B, dtype):
    width, channels = self.kernel.shape
    return jnp.zeros((B, width - 1, channels), dtype)


class SwiGLU(nnx.Module):
  """(silu(x W_gate) * (x W_up)) W_down."""

  def __init__(self, width, inner, *, std, rngs):
    up = dict(shape=(width, inner), axes=("embed", "mlp"), std=std, rngs=rngs)
    self.gate, self.up = Linear(**up), Linear(**up)
    self.down = Linear((inner, width), ("mlp", "embed"), std=std, rngs=rngs)

  def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def dt_bias(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
  """b with softplus(b) log-uniform between 0.001 and 0.1."""
  u = jax.random.uniform(rngs.params(), shape, jnp.float32)
  dt = jnp.exp(u * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3))
  return dt + jnp.log(-jnp.expm1(-dt))


def split_heads(x: Float[Array, "B L d"], heads: int) -> Float[Array, "B L H dh"]:
  return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


def merge_heads(x: Float[Array, "B L H dh"]) -> Float[Array, "B L d"]:
  return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
