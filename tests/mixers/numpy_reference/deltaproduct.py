"""For each token the decay of S, then steps S <- (I - beta_j k_j k_j^T) S + beta_j k_j v_j^T."""

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
  ("at(n - 1, q)", "at(0, q)"),
  ("else at(0, g)", "else at(n - 1, g)"),
  ("o[:, n - 1 :: n]", "o[:, ::n]"),
  ('True, "beta in (0, 2)', 'False, "beta in (0, 2)'),
]


def plain(mixer, x):
  H, dk, n = mixer.heads, mixer.key_size, mixer.cfg.steps
  q, k, v = (silu(y) for y in projections(mixer.qkv, x))
  q = l2_norm(heads(q, H))
  # The columns of keys and values are ordered by step, then by head.
  steps = lambda y: y.reshape(len(x), n, H, -1)
  k, v = l2_norm(steps(k)), steps(v)
  beta = steps(2 * sigmoid(linear(mixer.beta, x)))[..., 0]
  decay = np.ones((len(x), H))
  if mixer.cfg.forget_gate:
    dt = softplus(linear(mixer.decay, x) + array(mixer.dt_bias))
    decay = np.exp(-np.exp(array(mixer.A_log)) * dt)
  S = np.zeros((H, dk, v.shape[-1]))
  o = np.zeros((len(x), H, v.shape[-1]))
  for t in range(len(x)):
    for h in range(H):
      S[h] *= decay[t, h]
      for j in range(n):
        k_j, v_j = k[t, j, h], v[t, j, h]
        S[h] += beta[t, j, h] * np.outer(k_j, v_j - k_j @ S[h])
      o[t, h] = q[t, h] @ S[h] / np.sqrt(dk)
  return head_output(mixer.output, o, x)
