"""The long convolution by halves: what the first half of a block gives to the second.

A row is cut in two, each half in two, and so on. Long halves meet by FFT, short ones by a product
with a Toeplitz matrix. That is more work than one FFT over the whole row, but no token is ever in a
sum that an earlier token or one of another segment reads: both are exact, not up to rounding.
"""

import functools
import math

import jax
import jax.numpy as jnp

from deltanet_jax.ops.dtypes import matmul_precision_for

# Halves of up to so many tokens, and whole blocks where there are no segments, are multiplied.
PRODUCTS = 64


def levels(length: int, packed: bool) -> tuple[int, list[int]]:
  """Tokens of the blocks that are not cut, and of the halves of those that are."""
  block = 1 if packed else min(PRODUCTS, 1 << (length - 1).bit_length())
  halves, size = [], block
  while size < length:
    halves.append(size)
    size *= 2
  return block, halves


def conv_flops(length: int) -> float:
  """Operations per token and channel of a long convolution of so many tokens, a power of two."""
  block, halves = levels(length, packed=False)
  products = 2.0 * block + sum(half for half in halves if half <= PRODUCTS)
  # Two real transforms of twice the half for every two halves of tokens, and their product.
  return products + sum(5 * math.log2(2 * half) + 3 for half in halves if half > PRODUCTS)


def convolve(u, h, segments):
  """sum_{j <= t} h_{t-j} u_j of u `[B H e L]`, h `[H L]`, pairs of one segment alone."""
  L = u.shape[-1]
  block, halves = levels(L, segments is not None)
  whole = 2 * halves[-1] if halves else block
  u = jnp.pad(u, ((0, 0),) * 3 + ((0, whole - L),))
  h = jnp.pad(h, ((0, 0), (0, whole - L)))
  if segments is not None:
    segments = jnp.pad(segments, ((0, 0), (0, whole - L)), mode="edge")
  # Each recomputed in the backward by itself, so that one spectrum exists at a time.
  y = jax.checkpoint(_inside, static_argnums=2)(u, h, block)
  for half in halves:
    y = y + jax.checkpoint(_across, static_argnums=3)(u, h, segments, half)
  return y[..., :L]


def _inside(u, h, block):
  """The pairs inside the blocks that are not cut."""
  taps = jnp.pad(h[:, :block], ((0, 0), (block, 0)))
  return _multiply(u.reshape(*u.shape[:-1], -1, block), taps).reshape(u.shape)


def _across(u, h, segments, half):
  """What the second half of each block reads from the first."""
  cut = lambda x: x.reshape(*x.shape[:-1], -1, 2, half)
  first, taps = cut(u)[..., 0, :], h[:, : 2 * half]
  if segments is not None:
    # Segments are whole: only the one that the first half ends with can go on in the second.
    numbers = cut(segments)
    goes_on = (numbers == numbers[:, :, :1, -1:])[:, None, None]
    first = jnp.where(goes_on[..., 0, :], first, 0)
  second = (_multiply if half <= PRODUCTS else _transform)(first, taps)
  if segments is not None:
    second = jnp.where(goes_on[..., 1, :], second, 0)
  return jnp.stack([jnp.zeros_like(second), second], axis=-2).reshape(u.shape)


def _multiply(x, taps):
  """sum_j taps_{m+i-j} x_j of x `[B H e n m]`, taps `[H 2m]`."""
  with matmul_precision_for(x.dtype):
    return jnp.einsum("hij,bhenj->bheni", _toeplitz(taps), x)


def _toeplitz(taps):
  """taps_{m+i-j} as a matrix [H m m]."""
  (H, size), m = taps.shape, taps.shape[1] // 2
  # Rows of one number more than there are: each begins one further on. No gather, whose gradient
  # would be a scatter.
  backwards = jnp.tile(taps[:, ::-1], (1, m + 1))[:, : m * (size + 1)]
  return backwards.reshape(H, m, size + 1)[:, ::-1, :m]


def _transform(x, taps):
  """The same by FFT; circular over 2m, what is wrapped around falls into the half not read."""
  size = taps.shape[1]
  transform = functools.partial(jnp.fft.rfft, n=size)
  spectrum = transform(x) * transform(taps)[None, :, None, None]
  return jnp.fft.irfft(spectrum, size)[..., size // 2 :]
