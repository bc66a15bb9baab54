"""S_t = blockdiag_i(I - beta_t k_ti k_ti^T) S_{t-1} + beta_t k_t v_t^T, as full matrices."""

import numpy as np

from tests.mixers.numpy_reference import (
  head_output,
  heads,
  l2_norm,
  linear,
  projections,
  sigmoid,
  silu,
)

MUTATIONS = [
  ('"l2", cfg.block_size)', '"l2", cfg.key_size)'),
  ("beta = jax.nn.sigmoid(", "beta = 0.5 * jax.nn.sigmoid("),
  ("H, m, o.shape[3]).sum(axis=3)", "H, m, o.shape[3])[:, :, :, 0]"),
  ('Epilogue("silu", "l2"', 'Epilogue("relu", "l2"'),
]


def plain(mixer, x):
  H, dk, size = mixer.heads, mixer.key_size, mixer.cfg.block_size
  q, k, v = (heads(silu(y), H) for y in projections(mixer.qkv, x))
  q, k = (l2_norm(y.reshape(len(x), H, -1, size)).reshape(y.shape) for y in (q, k))
  beta = sigmoid(linear(mixer.beta, x))
  block = np.arange(dk) // size
  S = np.zeros((H, dk, v.shape[-1]))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      kk = np.outer(k[t, h], k[t, h]) * (block[:, None] == block)
      S[h] = (np.eye(dk) - beta[t, h] * kk) @ S[h] + beta[t, h] * np.outer(k[t, h], v[t, h])
      o[t, h] = q[t, h] @ S[h] / np.sqrt(dk)
  return head_output(mixer.output, o, x)
