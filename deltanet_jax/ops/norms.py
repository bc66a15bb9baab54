"""Normalisations of channels, all of them or those of each head, in float32 at least."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from deltanet_jax.ops.composable import composable
from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.dtypes import upcast
from pallas_kernels.common.autodiff import custom_backward
from pallas_kernels.common.bf16 import bf16_parts

# Inside the root of the L2 norm and beside the L1 norm, as the public checkpoints have it.
EPS = 1e-6


@composable(static=("eps",))
def rms_norm(
  x: Float[Array, "*b n"], scale: Float[Array, " d"], eps: float
) -> Float[Array, "*b n"]:
  """scale x / sqrt(mean(x^2) + eps) for every d channels."""
  y = _normalize(x, scale.shape[0], eps, True)
  scale = jnp.tile(scale.astype(y.dtype), x.shape[-1] // scale.shape[0])
  return (y * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


@composable(static=("eps", "size"))
def layer_norm(
  x: Float[Array, "*b n"],
  scale: Float[Array, " n"],
  bias: Float[Array, " n"] | None,
  eps: float,
  size: int | None = None,
) -> Float[Array, "*b n"]:
  """scale (x - mean) / sqrt(variance + eps) + bias for every `size` channels, all if None."""
  size = size or x.shape[-1]
  y = _normalize(_center(x, size), size, eps, True)
  over = lambda weight: weight.astype(y.dtype).reshape((1,) * (x.ndim - 1) + weight.shape)
  y = y * over(scale)
  return (y if bias is None else y + over(bias)).astype(x.dtype)


@composable(static=("size",))
def l2_norm(x: Float[Array, "*b n"], size: int | None = None) -> Float[Array, "*b n"]:
  """x / sqrt(sum(x^2) + 1e-6) for every `size` channels, all if None."""
  return _normalize(x, size or x.shape[-1], EPS, False).astype(x.dtype)


@composable(static=("size",))
def l1_norm(x: Float[Array, "*b n"], size: int | None = None) -> Float[Array, "*b n"]:
  """x / (sum |x| + 1e-6) for every `size` channels, all if None."""
  y = upcast(x)
  sums, spread = _reductions(size or x.shape[-1])
  return (y / (spread(sums(jnp.abs(y))) + EPS)).astype(x.dtype)


class _Heads(NamedTuple):
  sums: Callable  # [.. n] -> [.. n / size]
  spread: Callable  # back, every number repeated


def _reductions(size):
  def sums(y):
    return y.reshape(*y.shape[:-1], -1, size).sum(axis=-1)

  return _Heads(sums, lambda r: jnp.repeat(r, size, axis=-1))


def _products(size, parts):
  """The same by products with a matrix of zeros and ones, where a TPU would copy all into [.. H d].

  Exact to `parts` bfloat16 parts of a factor. A DeltaNet layer of width 2048 moves half the bytes.
  """

  def member(n):
    channel = lax.broadcasted_iota(jnp.int32, (n, n // size), 0) // size
    return (channel == lax.broadcasted_iota(jnp.int32, channel.shape, 1)).astype(jnp.bfloat16)

  dot = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)

  def sums(y):
    return sum(dot(part, member(y.shape[-1])) for part in reversed(bf16_parts(y, parts)))

  def spread(r):
    # All parts in one product: there are few heads, and it is as cheap as one.
    rows = member(r.shape[-1] * size).T
    return dot(jnp.concatenate(bf16_parts(r, 3), axis=-1), jnp.concatenate([rows] * 3, axis=0))

  return _Heads(sums, spread)


def _by_platform(f, args, size, eps, weight):
  with_heads = lambda heads: functools.partial(f, heads, eps=eps, weight=weight)
  x = args[0]
  if x.shape[-1] % size:
    raise ValueError(f"x has {x.shape[-1]} channels, expected a multiple of {size}.")
  if x.shape[-1] == size or x.dtype == jnp.float64:
    return with_heads(_reductions(size))(*args)
  parts = 3 if x.dtype == jnp.float32 else 2
  on_tpu = target_platform() == "tpu"
  return with_heads(_products(size, parts) if on_tpu else _reductions(size))(*args)


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
  return (_by_platform(_backward, (*args, d), size, eps, 1 / size if mean else 1.0),)


@custom_backward(_normalize_backward, static=(1, 2, 3))
def _normalize(x, size, eps, mean):
  """x / sqrt(sum(x^2) + eps), or the mean, for every `size` channels; float32 at least."""
  return _by_platform(_forward, (x,), size, eps, 1 / size if mean else 1.0)


# A projection is its own transpose; by hand, as parts of bfloat16 are no way for a gradient.
def _center_backward(size, args, d):
  (x,) = args
  return (_center(d, size).astype(x.dtype),)


@custom_backward(_center_backward, static=(1,))
def _center(x, size):
  """x minus the mean of every `size` channels, float32 at least."""
  center = lambda heads, x, *, eps, weight: upcast(x) - heads.spread(heads.sums(upcast(x))) * weight
  return _by_platform(center, (x,), size, 0.0, 1 / size)
