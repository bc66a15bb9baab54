"""y_t = x1_t (sum_{s <= t} h_s z_{t-s} + b z_t) with z = x2 v, channel by channel."""

import numpy as np

from tests.mixers.numpy_reference import array, hyena_filter, linear, short_conv

MUTATIONS = [
  ("math.log(0.01) / 1.5", "math.log(0.01) / 1.6"),
  ("math.log(0.01) / 0.3", "math.log(0.1) / 0.3"),
  ("np.cos(angle), -np.sin(angle)", "np.cos(angle), np.sin(angle)"),
  ("np.linspace(1e-4, bands - 1", "np.linspace(0.1, bands - 1"),
  ("np.arange(len(t))[:, None] / length", "np.arange(len(t))[:, None] / (length - 1)"),
  ("h = self.filter(L, accum).at[0].add", "h = self.filter(L, accum).at[0].subtract"),
  ("read, *written = jnp.split(y, 3, axis=-1)", "*written, read = jnp.split(y, 3, axis=-1)"),
  ("return read * y", "return y"),
]


def plain(mixer, x):
  x1, x2, v = np.split(short_conv(mixer.conv, linear(mixer.into, x)), 3, axis=1)
  h, b = hyena_filter(mixer.filter, mixer.cfg.length, len(x)), array(mixer.bias)
  z, y = x2 * v, np.zeros_like(v)
  for t in range(len(x)):
    y[t] = b * z[t]
    for s in range(t + 1):
      y[t] += h[s] * z[t - s]
  return linear(mixer.out, x1 * y)
