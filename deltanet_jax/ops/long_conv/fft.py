"""Long convolution by recursive halving: FFTs for long halves, Toeplitz matmuls for short ones.

The sequence is halved recursively; at each level the first half of a block contributes to the
second. That is more work than one FFT over the sequence, but causality and segment boundaries are
exact, not only up to rounding: no token enters a sum that an earlier token or another segment
reads.
"""

import functools
import math

import jax
import jax.numpy as jnp

from deltanet_jax.ops.dtypes import matmul_precision_for

# Up to this many tokens a half is a matmul; without segments also the size of undivided blocks.
MAX_MATMUL = 64


def levels(length: int, packed: bool) -> tuple[int, list[int]]:
  """Return the size of the undivided blocks, and of the halves at each level."""
  block = 1 if packed else min(MAX_MATMUL, 1 << (length - 1).bit_length())
  halves, size = [], block
  while size < length:
    halves.append(size)
    size *= 2
  return block, halves


def conv_flops(length: int) -> float:
  """Return the FLOPs per token and channel of a long convolution; `length` is a power of two."""
  block, halves = levels(length, packed=False)
  matmuls = 2.0 * block + sum(half for half in halves if half <= MAX_MATMUL)
  # Per two halves of tokens: two real FFTs of twice the half, and a product of spectra.
  return matmuls + sum(5 * math.log2(2 * half) + 3 for half in halves if half > MAX_MATMUL)


def convolve(u, h, segments):
  """Compute sum_{j <= t} h_{t-j} u_j within segments; u `[B H e L]`, h `[H L]`."""
  L = u.shape[-1]
  block, halves = levels(L, segments is not None)
  padded = 2 * halves[-1] if halves else block
  u = jnp.pad(u, ((0, 0),) * 3 + ((0, padded - L),))
  h = jnp.pad(h, ((0, 0), (0, padded - L)))
  if segments is not None:
    segments = jnp.pad(segments, ((0, 0), (0, padded - L)), mode="edge")
  # Each level is rematerialized separately, so that one spectrum is live at a time.
  y = jax.checkpoint(_inside, static_argnums=2)(u, h, block)
  for half in halves:
    y = y + jax.checkpoint(_across, static_argnums=3)(u, h, segments, half)
  return y[..., :L]


def _inside(u, h, block):
  """Contributions inside the undivided blocks."""
  taps = jnp.pad(h[:, :block], ((0, 0), (block, 0)))
  return _multiply(u.reshape(*u.shape[:-1], -1, block), taps).reshape(u.shape)


def _across(u, h, segments, half):
  """Contributions of the first half of each block to the second."""
  split = lambda x: x.reshape(*x.shape[:-1], -1, 2, half)
  first, taps = split(u)[..., 0, :], h[:, : 2 * half]
  if segments is not None:
    # Segments are contiguous: only the last one of the first half can continue in the second.
    numbers = split(segments)
    continues = (numbers == numbers[:, :, :1, -1:])[:, None, None]
    first = jnp.where(continues[..., 0, :], first, 0)
  second = (_multiply if half <= MAX_MATMUL else _fft_multiply)(first, taps)
  if segments is not None:
    second = jnp.where(continues[..., 1, :], second, 0)
  return jnp.stack([jnp.zeros_like(second), second], axis=-2).reshape(u.shape)


def _multiply(x, taps):
  """sum_j taps_{m+i-j} x_j as a matmul; x `[B H e n m]`, taps `[H 2m]`."""
  with matmul_precision_for(x.dtype):
    return jnp.einsum("hij,bhenj->bheni", _toeplitz(taps), x)


def _toeplitz(taps):
  """Return the Toeplitz matrices taps_{m+i-j}, [H m m]."""
  (H, size), m = taps.shape, taps.shape[1] // 2
  # Reshaping to rows of size + 1 shifts each row by one. A gather's gradient would be a scatter.
  reverse = jnp.tile(taps[:, ::-1], (1, m + 1))[:, : m * (size + 1)]
  return reverse.reshape(H, m, size + 1)[:, ::-1, :m]


def _fft_multiply(x, taps):
  """The same by FFT, circular over 2m; what wraps around is in the half that is discarded."""
  size = taps.shape[1]
  rfft = functools.partial(jnp.fft.rfft, n=size)
  spectrum = rfft(x) * rfft(taps)[None, :, None, None]
  return jnp.fft.irfft(spectrum, size)[..., size // 2 :]
