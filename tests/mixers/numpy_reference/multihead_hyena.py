"""o_t = q_t (sum_{s <= t} h_s k_{t-s} v_{t-s}^T + b k_t v_t^T), one filter and bias per head."""

import numpy as np

from tests.mixers.numpy_reference import array, heads, hyena_filter, linear, short_conv

MUTATIONS = [
  ("h = self.filter(L, accum).at[0].add", "h = 2 * self.filter(L, accum).at[0].add"),
  ("read, *written = jnp.split(y, 3, axis=-1)", "*written, read = jnp.split(y, 3, axis=-1)"),
  ("long_conv_attention(q, k, v", "long_conv_attention(k, q, v"),
  ("long_conv_attention(q, k, v", "long_conv_attention(q, v, k"),
  ("math.log(0.01) / 0.3", "math.log(0.01) / 0.4"),
]


def plain(mixer, x):
  q, k, v = np.split(short_conv(mixer.conv, linear(mixer.into, x)), 3, axis=1)
  h, b = hyena_filter(mixer.filter, mixer.cfg.length, len(x)), array(mixer.bias)
  H = h.shape[1]
  q, k, v = heads(q, H), heads(k, H), heads(v, H)
  o = np.zeros_like(v)
  for t in range(len(x)):
    for i in range(H):
      Z = b[i] * np.outer(k[t, i], v[t, i])
      for s in range(t + 1):
        Z += h[s, i] * np.outer(k[t - s, i], v[t - s, i])
      o[t, i] = q[t, i] @ Z
  return linear(mixer.out, o.reshape(len(x), -1))
