"""Kimi Delta Attention token by token, from its formulas."""

import numpy as np

from tests.support.plain_deltanet import conv, rms_norm, sigmoid, silu

CHANGES = [
  ("g = -jnp.exp(self.A_log", "g = -0.9 * jnp.exp(self.A_log"),
  ("jax.nn.softplus(self.decay", "jax.nn.silu(self.decay"),
  ("l2_norm(y, self.key_size)", "l2_norm(y, self.key_size // 2)"),
  ("beta = jax.nn.sigmoid(", "beta = 0.5 * jax.nn.sigmoid("),
  ("squash=jax.nn.sigmoid", "squash=jax.nn.silu"),
]


def plain(mixer, x):
  cfg, H, dk, dv = mixer.cfg, mixer.heads, mixer.key_size, mixer.value_size
  w = lambda p: np.asarray(p[...], np.float64)
  low_rank = lambda m: x @ w(m.down.kernel) @ w(m.up.kernel)
  heads = {}
  for name in "qkv":
    y = x @ w(getattr(mixer.qkv, name).kernel)
    y = conv(y, w(getattr(mixer.qkv, f"{name}_conv").kernel).T[:, None])
    heads[name] = silu(y).reshape(len(x), H, -1)
  norm = lambda y: y / np.sqrt((y * y).sum(axis=-1, keepdims=True) + 1e-6)
  q, k, v = norm(heads["q"]) / np.sqrt(dk), norm(heads["k"]), heads["v"]
  beta = (2 if cfg.negative_eigenvalues else 1) * sigmoid(x @ w(mixer.beta.kernel))
  dt = np.log1p(np.exp(low_rank(mixer.decay) + w(mixer.dt_bias))).reshape(len(x), H, dk)
  alpha = np.exp(-np.exp(w(mixer.A_log))[:, None] * dt)
  gate = sigmoid(low_rank(mixer.output.gate) + w(mixer.output.gate.up.bias))
  o = np.zeros((len(x), H, dv))
  for h in range(H):
    S = np.zeros((dk, dv))
    for t in range(len(x)):
      S = alpha[t, h][:, None] * S
      S = S + beta[t, h] * np.outer(k[t, h], v[t, h] - k[t, h] @ S)
      o[t, h] = rms_norm(q[t, h] @ S, w(mixer.output.norm.scale), mixer.output.norm.eps)
  return (o.reshape(len(x), -1) * gate) @ w(mixer.output.out.kernel)
