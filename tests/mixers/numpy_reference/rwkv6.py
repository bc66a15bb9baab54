"""o_t = r_t (S_{t-1} + (u * k_t) v_t), S_t = Diag(e^{w_t}) S_{t-1} + k_t v_t, with token shift."""

import numpy as np

from tests.mixers.numpy_reference import array, heads, linear, silu


def plain(mixer, x):
  H, L = mixer.heads, len(x)
  previous = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
  delta = previous - x
  m = np.tanh((x + delta * array(mixer.share)) @ array(mixer.shift_down)).reshape(L, 5, -1)
  shares, up = array(mixer.shares), array(mixer.shift_up)
  x_w, x_k, x_v, x_r, x_g = (x + delta * (shares[j] + m[:, j] @ up[j]) for j in range(5))
  low_rank = np.tanh(x_w @ array(mixer.decay_down)) @ array(mixer.decay_up)
  w = heads(-np.exp(array(mixer.decay) + low_rank), H)
  layers = ((mixer.r, x_r), (mixer.k, x_k), (mixer.v, x_v))
  r, k, v = (heads(linear(layer, y), H) for layer, y in layers)
  u = array(mixer.bonus).reshape(H, -1)
  o = np.zeros_like(v)
  S = np.zeros((H, k.shape[-1], v.shape[-1]))
  for t in range(L):
    for h in range(H):
      o[t, h] = r[t, h] @ (S[h] + np.outer(u[h] * k[t, h], v[t, h]))
      S[h] = np.exp(w[t, h])[:, None] * S[h] + np.outer(k[t, h], v[t, h])
  o = o - o.mean(axis=-1, keepdims=True)
  o = o / np.sqrt((o * o).mean(axis=-1, keepdims=True) + 64e-5)
  y = o.reshape(L, -1) * array(mixer.norm.scale) + array(mixer.norm.bias)
  return linear(mixer.out, y * silu(linear(mixer.g, x_g)))


MUTATIONS = [
  ("eps=64e-5", "eps=64e-3"),
  ("scale=1.0)\n", "scale=None)\n"),
  ("o = o + own", "o = o - own"),
  ("return -jnp.exp(", "return -0.5 * jnp.exp("),
  ("x_w, x_k, x_v, x_r, x_g = ", "x_w, x_v, x_k, x_r, x_g = "),
  ("jax.nn.silu(self.g(x_g))", "jax.nn.sigmoid(self.g(x_g))"),
  ("jnp.tanh(x @ down)", "jax.nn.relu(x @ down)"),
]
