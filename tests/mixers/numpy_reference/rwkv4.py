"""o_t = (sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same with 1 for v)."""

import numpy as np

from tests.mixers.numpy_reference import array, linear, sigmoid


def plain(mixer, x):
  previous = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
  mixed = lambda share: x + (previous - x) * array(share)
  k, v = linear(mixer.k, mixed(mixer.k_share)), linear(mixer.v, mixed(mixer.v_share))
  r = sigmoid(linear(mixer.r, mixed(mixer.r_share)))
  w, u = -np.exp(array(mixer.decay)), array(mixer.bonus)
  o = np.zeros_like(v)
  for t in range(len(x)):
    weights = [np.exp((t - 1 - i) * w + k[i]) for i in range(t)] + [np.exp(u + k[t])]
    o[t] = sum(a * b for a, b in zip(weights, v)) / sum(weights)
  return linear(mixer.out, r * o)


MUTATIONS = [
  ("w, u = -jnp.exp(", "w, u = -0.5 * jnp.exp("),
  ("self.bonus[...].astype(accum)", "-self.bonus[...].astype(accum)"),
  ("jax.nn.sigmoid(self.r", "jax.nn.silu(self.r"),
  ("self.k(lerp(x, previous, self.k_share))", "self.k(lerp(previous, x, self.k_share))"),
]
