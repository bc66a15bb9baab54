"""The diagonal state space as a long convolution with its impulse response.

The powers of the transition `[d L N]` are never materialized: exp(log_A)^(aC + b) is the product of
a power aC and a power b, so impulse response, carried state and last state are computed from two
arrays of about sqrt(L) powers each.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deltanet_jax.ops.dtypes import matmul_precision_for
from deltanet_jax.ops.long_conv import long_conv
from deltanet_jax.ops.segments import number_segments


class _Powers(NamedTuple):
  far: jax.Array  # [d n N]: exp(log_A C)^a
  near: jax.Array  # [d C N]: exp(log_A)^b


def _powers(log_A, L):
  size = 1 << math.ceil(math.log2(L) / 2)
  exponents = lambda count, step: (step * jnp.arange(count)).astype(log_A.dtype)
  power = lambda exponent: jnp.exp(log_A[:, None] * exponent[None, :, None])
  return _Powers(power(exponents(-(-L // size), size)), power(exponents(size, 1)))


def convolve(u, log_A, B, C, S0, segment_ids):
  """Return (y, S) of a sequence."""
  L = u.shape[1]
  # At least float32 precision, whatever the input dtype: the powers are near 1.
  with matmul_precision_for(u.dtype):
    powers = _powers(log_A, L)
    y = long_conv(u, _read(C * B, powers, L).T, segment_ids=segment_ids)
    segments = number_segments(segment_ids)
    if segments is not None:
      # Only the last segment contributes to the last state.
      u = jnp.where((segments == segments[:, -1:])[..., None], u, 0)
    S = _last_state(u, B, powers)
    if S0 is not None:
      carried = jnp.moveaxis(_read((C * jnp.exp(log_A))[None] * S0, powers, L), 2, 1)
      remaining = jnp.exp(L * log_A)[None] * S0
      if segments is not None:
        carried = jnp.where((segments == 0)[..., None], carried, 0)
        remaining = jnp.where((segments[:, -1:] == 0)[..., None], remaining, 0)
      y, S = y + carried, S + remaining
  return y, S


def _read(weights, powers, L):
  """2 Re sum_n weights_n exp(log_A_n)^t for t < L: weights `[.. d N]` to `[.. d L]`."""
  far = weights[..., None, :] * powers.far.reshape((1,) * (weights.ndim - 2) + powers.far.shape)
  y = 2 * jnp.einsum("...dan,dbn->...dab", far, powers.near).real
  return y.reshape(*y.shape[:-2], -1)[..., :L]


def _last_state(u, B, powers):
  """Return the last state for a zero initial state."""
  batch, L, d = u.shape
  n, size = powers.far.shape[1], powers.near.shape[1]
  reverse = jnp.pad(u[:, ::-1], ((0, 0), (0, n * size - L), (0, 0))).astype(B.dtype)
  reverse = jnp.moveaxis(reverse, 1, 2).reshape(batch, d, n, size)
  near = jnp.einsum("Bdab,dbn->Bdan", reverse, powers.near)
  return B[None] * jnp.einsum("Bdan,dan->Bdn", near, powers.far)
