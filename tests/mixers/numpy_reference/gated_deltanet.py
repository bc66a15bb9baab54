"""S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T with a_t = e^{-A softplus(.)}."""

import numpy as np

from tests.mixers.numpy_reference import (
  array,
  head_output,
  heads,
  l2_norm,
  linear,
  projections,
  sigmoid,
  silu,
  softplus,
)

MUTATIONS = [
  ("g = -jnp.exp(self.A_log", "g = -2 * jnp.exp(self.A_log"),
  ("g = -jnp.exp(self.A_log", "g = -jnp.exp(-self.A_log"),
  ("+ self.dt_bias[...]", "- self.dt_bias[...]"),
  ("jax.nn.softplus(decay[0]", "jax.nn.sigmoid(decay[0]"),
  ("jax.nn.sigmoid(beta.astype", "2 * jax.nn.sigmoid(beta.astype"),
  ('Epilogue("silu", size=dv)', "Epilogue(size=dv)"),
  ("self.run(q, k, v, beta, g,", "self.run(q, k, v, beta, None,"),
]


def plain(mixer, x):
  H, qkv = mixer.heads, mixer.qkv
  q, k, v = (heads(silu(y), H) for y in projections(qkv, x))
  q, k = l2_norm(q), l2_norm(k)
  beta = sigmoid(linear(mixer.beta, x))
  decay = np.exp(
    -np.exp(array(mixer.A_log)) * softplus(linear(mixer.decay, x) + array(mixer.dt_bias))
  )
  S = np.zeros((H, q.shape[-1], v.shape[-1]))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      S[h] *= decay[t, h]
      S[h] += beta[t, h] * np.outer(k[t, h], v[t, h] - k[t, h] @ S[h])
      o[t, h] = q[t, h] @ S[h] / np.sqrt(q.shape[-1])
  return head_output(mixer.output, o, x)
