"""The same as plain operations, for second derivatives."""

import jax.numpy as jnp
from jax import lax


def short_conv(x, taps, ages, *, epilogue, size, width):
  """As the kernels have it, from x [B, L, D], taps [B, width (+ 1), D] and ages [B, L] or None."""
  y = taps[:, width:].sum(axis=1, keepdims=True)
  for s in range(width):
    seen = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (s, -s, 0), (0, 0, 0)])
    seen = seen if ages is None else jnp.where((ages >= s)[..., None], seen, 0)
    y = y + seen.astype(taps.dtype) * taps[:, s : s + 1]
  heads = y.reshape(*y.shape[:2], -1, size)
  return epilogue(heads, lambda x: x.sum(axis=-1, keepdims=True)).reshape(x.shape).astype(x.dtype)


def short_convs(x, taps, ages, *, parts, width):
  """The same for parts of x's channels, one after the other."""
  start, out = 0, []
  for epilogue, size, channels in parts:
    own = slice(start, start + channels)
    options = dict(epilogue=epilogue, size=size, width=width)
    out.append(short_conv(x[..., own], taps[..., own], ages, **options))
    start += channels
  return tuple(out)
