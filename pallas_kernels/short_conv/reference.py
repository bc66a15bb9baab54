"""Short convolutions with epilogue in plain JAX, for second derivatives of the kernels."""

import jax.numpy as jnp
from jax import lax


def short_conv(x, taps, positions, *, epilogue, size, width):
  """Convolve x [B, L, D] with taps [B, width (+ 1 for a bias), D]; positions [B, L] or None."""
  y = taps[:, width:].sum(axis=1, keepdims=True)
  for s in range(width):
    shifted = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (s, -s, 0), (0, 0, 0)])
    shifted = shifted if positions is None else jnp.where((positions >= s)[..., None], shifted, 0)
    y = y + shifted.astype(taps.dtype) * taps[:, s : s + 1]
  heads = y.reshape(*y.shape[:2], -1, size)
  return epilogue(heads, lambda x: x.sum(axis=-1, keepdims=True)).reshape(x.shape).astype(x.dtype)


def short_convs(x, taps, positions, *, parts, width):
  """Apply `short_conv` to consecutive parts of the channels of x, each with its own epilogue."""
  start, out = 0, []
  for epilogue, size, channels in parts:
    own = slice(start, start + channels)
    options = dict(epilogue=epilogue, size=size, width=width)
    out.append(short_conv(x[..., own], taps[..., own], positions, **options))
    start += channels
  return tuple(out)
