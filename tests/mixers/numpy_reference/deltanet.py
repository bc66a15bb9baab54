"""S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = q_t S_t / sqrt(dk)."""

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
  ("Epilogue(cfg.activation, cfg.norm, dk)", 'Epilogue("identity", cfg.norm, dk)'),
  ("Epilogue(cfg.activation, cfg.norm, dk)", "Epilogue(cfg.activation, cfg.norm, dk // 2)"),
  ('norm: Norm = setting("l2"', 'norm: Norm = setting("l1"'),
  ("beta = jax.nn.sigmoid(", "beta = 2 * jax.nn.sigmoid("),
  ("jax.nn.sigmoid(beta.astype", "jax.nn.sigmoid(-beta.astype"),
  ('Epilogue("silu", size=dv)', "Epilogue(size=dv)"),
  ("self.run(q, k, v, beta", "self.run(k, q, v, beta"),
  ("self.run(q, k, v, beta, None", "self.run(q, k, v, beta, -beta"),
]


def l1_norm(x):
  return x / (np.abs(x).sum(axis=-1, keepdims=True) + 1e-6)


ACTIVATIONS = {
  "silu": silu,
  "relu": lambda x: np.maximum(x, 0),
  "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
}


def plain(mixer, x):
  H, qkv, original = mixer.heads, mixer.qkv, mixer.cfg.activation == "elu"
  act = ACTIVATIONS[mixer.cfg.activation]
  norm = l1_norm if original else l2_norm  # the DeltaNet of 2021 has elu and l1
  q, k, v = projections(qkv, x)
  q, k, v = norm(heads(act(q), H)), norm(heads(act(k), H)), heads(silu(v), H)
  beta = sigmoid(linear(mixer.beta, x)) * (2 if mixer.cfg.negative_eigenvalues else 1)
  S = np.zeros((H, q.shape[-1], v.shape[-1]))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      S[h] += beta[t, h] * np.outer(k[t, h], v[t, h] - k[t, h] @ S[h])
      o[t, h] = q[t, h] @ S[h] / np.sqrt(q.shape[-1])
  return head_output(mixer.output, o, x)
