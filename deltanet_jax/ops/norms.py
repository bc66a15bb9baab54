"""RMS, layer, L2 and L1 norms over all channels or per head, in at least float32."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.dtypes import upcast
from pallas_kernels.common.autodiff import custom_backward
from pallas_kernels.common.bf16 import bf16_parts

# Added inside the root of the L2 norm and to the L1 norm, as in the public checkpoints.
EPS = 1e-6


def rms_norm(
  x: Float[Array, "*b n"], scale: Float[Array, " d"], eps: float
) -> Float[Array, "*b n"]:
  """Apply RMSNorm to each group of d channels: scale x / sqrt(mean(x^2) + eps)."""
  y = _normalize(x, scale.shape[0], eps, True)
  scale = jnp.tile(scale.astype(y.dtype), x.shape[-1] // scale.shape[0])
  return (y * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


def layer_norm(
  x: Float[Array, "*b n"],
  scale: Float[Array, " n"],
  bias: Float[Array, " n"] | None,
  eps: float,
  size: int | None = None,
) -> Float[Array, "*b n"]:
  """Apply LayerNorm: scale (x - mean) / sqrt(variance + eps) + bias.

  Args:
    size: Number of channels of a group that is normalized together; None for all.
  """
  size = size or x.shape[-1]
  y = _normalize(_center(x, size), size, eps, True)
  over = lambda weight: weight.astype(y.dtype).reshape((1,) * (x.ndim - 1) + weight.shape)
  y = y * over(scale)
  return (y if bias is None else y + over(bias)).astype(x.dtype)


def l2_norm(x: Float[Array, "*b n"], size: int | None = None) -> Float[Array, "*b n"]:
  """Normalize each group of `size` channels (all if None): x / sqrt(sum(x^2) + 1e-6)."""
  return _normalize(x, size or x.shape[-1], EPS, False).astype(x.dtype)


def l1_norm(x: Float[Array, "*b n"], size: int | None = None) -> Float[Array, "*b n"]:
  """Normalize each group of `size` channels (all if None): x / (sum |x| + 1e-6)."""
  y = upcast(x)
  sums, spread = _reductions(size or x.shape[-1])
  return (y / (spread(sums(jnp.abs(y))) + EPS)).astype(x.dtype)


class _Heads(NamedTuple):
  """Reduction over the channels of each head, and its broadcast."""

  sums: Callable  # [.. n] -> [.. n / size]
  spread: Callable  # [.. n / size] -> [.. n], repeating


def _reductions(size):
  def sums(y):
    return y.reshape(*y.shape[:-1], -1, size).sum(axis=-1)

  return _Heads(sums, lambda r: jnp.repeat(r, size, axis=-1))


def _matmul_reductions(size, parts):
  """The same by matmuls with a 0/1 matrix: a TPU would copy x into the layout [.. H d].

  Accurate to `parts` bfloat16 parts of a factor. Halves the bytes that a DeltaNet layer of width
  2048 moves.
  """

  def indicator(n):
    channel = lax.broadcasted_iota(jnp.int32, (n, n // size), 0) // size
    return (channel == lax.broadcasted_iota(jnp.int32, channel.shape, 1)).astype(jnp.bfloat16)

  dot = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)

  def sums(y):
    return sum(dot(part, indicator(y.shape[-1])) for part in reversed(bf16_parts(y, parts)))

  def spread(r):
    # All parts in one matmul: there are few heads, so it costs the same as one part.
    rows = indicator(r.shape[-1] * size).T
    return dot(jnp.concatenate(bf16_parts(r, 3), axis=-1), jnp.concatenate([rows] * 3, axis=0))

  return _Heads(sums, spread)


def _reduce_heads(f, args, size, eps, weight):
  with_heads = lambda heads: functools.partial(f, heads, eps=eps, weight=weight)
  x = args[0]
  if x.shape[-1] % size:
    raise ValueError(f"x has {x.shape[-1]} channels, expected a multiple of {size}.")
  if x.shape[-1] == size or x.dtype == jnp.float64:
    return with_heads(_reductions(size))(*args)
  parts = 3 if x.dtype == jnp.float32 else 2
  on_tpu = target_platform() == "tpu"
  return with_heads(_matmul_reductions(size, parts) if on_tpu else _reductions(size))(*args)


def _inverse(heads, y, eps, weight):
  return lax.rsqrt(heads.sums(y * y) * weight + eps)


def _forward(heads, x, *, eps, weight):
  y = upcast(x)
  return y * heads.spread(_inverse(heads, y, eps, weight))


def _backward(heads, x, d, *, eps, weight):
  y = upcast(x)
  r = _inverse(heads, y, eps, weight)
  along = heads.sums(y * d) * weight * r * r * r
  return (d * heads.spread(r) - y * heads.spread(along)).astype(x.dtype)


def _normalize_backward(size, eps, mean, args, d):
  return (_reduce_heads(_backward, (*args, d), size, eps, 1 / size if mean else 1.0),)


@custom_backward(_normalize_backward, static=(1, 2, 3))
def _normalize(x, size, eps, mean):
  """x / sqrt(sum(x^2) + eps), or of the mean, per `size` channels; at least float32."""
  return _reduce_heads(_forward, (x,), size, eps, 1 / size if mean else 1.0)


# A projection is its own transpose. Custom VJP: the bfloat16 splitting is not differentiable.
def _center_backward(size, args, d):
  (x,) = args
  return (_center(d, size).astype(x.dtype),)


@custom_backward(_center_backward, static=(1,))
def _center(x, size):
  """x minus the mean of every `size` channels, at least float32."""
  center = lambda heads, x, *, eps, weight: upcast(x) - heads.spread(heads.sums(upcast(x))) * weight
  return _reduce_heads(center, (x,), size, 0.0, 1 / size)
