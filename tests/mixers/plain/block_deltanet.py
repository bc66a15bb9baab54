"""DeltaNet with block-diagonal transitions token by token, the transition as one whole matrix."""

import numpy as np

from tests.support.plain_deltanet import conv, rms_norm, sigmoid, silu

CHANGES = [
  ("l2_norm(y, size)", "l2_norm(y, m * size)"),
  ("beta = jax.nn.sigmoid(", "beta = 0.5 * jax.nn.sigmoid("),
  ("H, m, o.shape[3]).sum(axis=3)", "H, m, o.shape[3])[:, :, :, 0]"),
  ("(jax.nn.silu(y) for y in (q, k, v))", "(jax.nn.relu(y) for y in (q, k, v))"),
]


def plain(mixer, x):
  cfg, H, dk, dv = mixer.cfg, mixer.heads, mixer.key_size, mixer.value_size
  L, size = len(x), cfg.block_size
  w = lambda p: np.asarray(p[...], np.float64)
  heads = {}
  for name in "qkv":
    y = x @ w(getattr(mixer.qkv, name).kernel)
    y = conv(y, w(getattr(mixer.qkv, f"{name}_conv").kernel).T[:, None])
    heads[name] = silu(y).reshape(L, H, -1)

  def norm(y):
    blocks = y.reshape(L, H, -1, size)
    return (blocks / np.sqrt((blocks**2).sum(axis=-1, keepdims=True) + 1e-6)).reshape(L, H, dk)

  q, k, v = norm(heads["q"]) / np.sqrt(dk), norm(heads["k"]), heads["v"]
  beta = sigmoid(x @ w(mixer.beta.kernel)) * (2 if cfg.negative_eigenvalues else 1)
  block = np.arange(dk) // size
  o = np.zeros((L, H, dv))
  for h in range(H):
    S = np.zeros((dk, dv))
    for t in range(L):
      outer = np.outer(k[t, h], k[t, h]) * (block[:, None] == block)
      S = (np.eye(dk) - beta[t, h] * outer) @ S + beta[t, h] * np.outer(k[t, h], v[t, h])
      o[t, h] = rms_norm(q[t, h] @ S, w(mixer.output.norm.scale), mixer.output.norm.eps)
  return o.reshape(L, -1) @ w(mixer.output.out.kernel)
