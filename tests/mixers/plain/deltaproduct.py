"""DeltaProduct token by token and step by step, from its formulas."""

import numpy as np

from tests.support.plain_deltanet import conv, rms_norm, sigmoid, silu

CHANGES = [
  ("at(n - 1, q)", "at(0, q)"),
  ("else at(0, g)", "else at(n - 1, g)"),
  ("o[:, n - 1 :: n]", "o[:, ::n]"),
  ("split_heads(q, H), split_heads(k, n * H)", "split_heads(q, H), -split_heads(k, n * H)"),
]


def plain(mixer, x):
  cfg, H, dk, dv = mixer.cfg, mixer.heads, mixer.key_size, mixer.value_size
  L, n = len(x), cfg.steps
  w = lambda p: np.asarray(p[...], np.float64)
  heads = {}
  for name in "qkv":
    y = x @ w(getattr(mixer.qkv, name).kernel)
    y = conv(y, w(getattr(mixer.qkv, f"{name}_conv").kernel).T[:, None])
    heads[name] = silu(y).reshape(L, 1 if name == "q" else n, H, -1)
  norm = lambda y: y / np.sqrt((y * y).sum(axis=-1, keepdims=True) + 1e-6)
  q, k, v = norm(heads["q"])[:, 0] / np.sqrt(dk), norm(heads["k"]), heads["v"]
  beta = sigmoid(x @ w(mixer.beta.kernel)).reshape(L, n, H)
  beta = 2 * beta if cfg.negative_eigenvalues else beta
  dt = np.log1p(np.exp(x @ w(mixer.decay.kernel) + w(mixer.dt_bias)))
  alpha = np.exp(-np.exp(w(mixer.A_log)) * dt)
  o = np.zeros((L, H, dv))
  for h in range(H):
    S = np.zeros((dk, dv))
    for t in range(L):
      S = alpha[t, h] * S
      for j in range(n):
        k_j, v_j = k[t, j, h], v[t, j, h]
        S = S + beta[t, j, h] * np.outer(k_j, v_j - k_j @ S)
      o[t, h] = rms_norm(q[t, h] @ S, w(mixer.output.norm.scale), mixer.output.norm.eps)
  return (o.reshape(L, -1) * silu(x @ w(mixer.output.gate.kernel))) @ w(mixer.output.out.kernel)
