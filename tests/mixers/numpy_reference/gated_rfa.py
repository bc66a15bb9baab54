"""S_t = a_t S_{t-1} + (1 - a_t) f(k_t) v_t^T, z_t with 1 for v_t, o_t = f(q_t) S_t / f(q_t) z_t."""

import numpy as np

from tests.mixers.numpy_reference import array, heads, linear, projections, sigmoid

MUTATIONS = [
  ('0, "Random seed', '1, "Random seed'),
  ("smallest: float = setting(0.01", "smallest: float = setting(0.8"),
  ("jax.nn.sigmoid(-gate)", "jax.nn.sigmoid(gate)"),
  ("jax.nn.log_sigmoid(gate)", "jax.nn.log_sigmoid(-gate)"),
  ("norm + 1e-3", "norm + 1e-2"),
  ("jnp.sin(angles)", "jnp.sin(2 * angles)"),
  ("self.sharpness[...].astype(y.dtype)", "(1 / self.sharpness[...].astype(y.dtype))"),
]


def features(x, W):
  angles = W @ (x / (np.linalg.norm(x) + 1e-3))
  return np.concatenate([np.sin(angles), np.cos(angles)]) / np.sqrt(len(angles))


def plain(mixer, x):
  qkv, H = mixer.qkv, mixer.heads
  q, k, v = (heads(y, H) for y in projections(qkv, x))
  a = sigmoid(linear(mixer.decay, x))
  d = q.shape[-1]
  W = np.random.RandomState(0).standard_normal((H, mixer.cfg.features, d))
  W = W * array(mixer.sharpness)[:, None, :]
  o = np.zeros_like(v)
  for h in range(H):
    S, z = 0.0, 0.0
    for t in range(len(x)):
      f_q, f_k = features(q[t, h], W[h]), features(k[t, h], W[h])
      S = a[t, h] * S + (1 - a[t, h]) * np.outer(f_k, v[t, h])
      z = a[t, h] * z + (1 - a[t, h]) * f_k
      o[t, h] = (f_q @ S) / max(f_q @ z, 0.01)
  return linear(mixer.out, o.reshape(len(x), -1))
