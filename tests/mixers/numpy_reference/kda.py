"""S_t = (I - beta_t k_t k_t^T) Diag(a_t) S_{t-1} + beta_t k_t v_t^T, with a per-channel decay a."""

import numpy as np

from tests.mixers.numpy_reference import (
  array,
  heads,
  l2_norm,
  linear,
  projections,
  rms_norm,
  sigmoid,
  silu,
  softplus,
)

MUTATIONS = [
  ("g = -jnp.exp(self.A_log", "g = -0.9 * jnp.exp(self.A_log"),
  ("+ self.dt_bias[...]", "- self.dt_bias[...]"),
  ("jax.nn.softplus(decay.astype", "jax.nn.silu(decay.astype"),
  ('Epilogue("silu", "l2", dk)', 'Epilogue("silu", "l2", dk // 2)'),
  ("jax.nn.sigmoid(beta.astype", "0.5 * jax.nn.sigmoid(beta.astype"),
  ('gate_activation="sigmoid"', 'gate_activation="silu"'),
]


def plain(mixer, x):
  H, dk = mixer.heads, mixer.key_size
  low_rank = lambda layer: linear(layer.up, linear(layer.down, x))
  q, k, v = (heads(silu(y), H) for y in projections(mixer.qkv, x))
  q, k = l2_norm(q), l2_norm(k)
  beta = (2 if mixer.cfg.negative_eigenvalues else 1) * sigmoid(linear(mixer.beta, x))
  dt = heads(softplus(low_rank(mixer.decay) + array(mixer.dt_bias)), H)
  decay = np.exp(-np.exp(array(mixer.A_log))[:, None] * dt)
  S = np.zeros((H, dk, v.shape[-1]))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      S[h] *= decay[t, h][:, None]
      S[h] += beta[t, h] * np.outer(k[t, h], v[t, h] - k[t, h] @ S[h])
      o[t, h] = q[t, h] @ S[h] / np.sqrt(dk)
  y = rms_norm(o, mixer.output.norm.scale).reshape(len(x), -1)
  return linear(mixer.output.out, y * sigmoid(low_rank(mixer.output.gate)))
