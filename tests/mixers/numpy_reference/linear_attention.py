"""S_t = S_{t-1} + f(k_t) v_t^T, o_t = f(q_t) S_t, divided by f(q_t) . sum of f(k) if normalized."""

import numpy as np

from tests.mixers.numpy_reference import convolved, head_output, heads, linear

MUTATIONS = [
  ('"silu" if cfg.conv else "identity"', '"identity"'),
  ("total + 1e-10", "total + 1e-4"),
  ("o / (total", "o * (total"),
  ("self.q_map(q), self.k_map(k)", "self.k_map(q), self.q_map(k)"),
  ("q, k = self.q_map(q), self.k_map(k)", "q, k = self.q_map(q), self.k_map(q)"),
  ("self.run(q, k, v, None,", "self.run(q, k, v, k[..., 0] * 0 - 0.1,"),
]


def features(layer, x):
  """Feature map f(x) of x `[d]`, one head of one token."""
  d = len(x)
  relu = lambda y: np.maximum(y, 0)
  match layer.name:
    case "identity":
      return x
    case "elu":
      return np.where(x > 0, x + 1, np.exp(x))
    case "relu":
      return relu(x)
    case "t2r":
      return relu(linear(layer.first, x))
    case "hadamard":
      return linear(layer.first, x) * linear(layer.second, x)
    case "hedgehog":
      u = linear(layer.first, x)
      e = np.exp(2 * np.concatenate([u, -u]))
      return e / e.sum()
    case "dpfp":
      r = np.concatenate([relu(x), relu(-x)])
      return np.array([r[i] * r[i - j - 1] for j in range(layer.nu) for i in range(2 * d)])
    case "taylor":
      pairs = [x[i] * x[j] / np.sqrt(d) for i in range(d) for j in range(i + 1, d)]
      return np.array([1, *x / d**0.25, *x**2 / np.sqrt(2 * d), *pairs])


def plain(mixer, x):
  qkv, H = mixer.qkv, mixer.heads
  q, k, v = (heads(y, H) for y in convolved(qkv, x))
  o = np.zeros_like(v)
  for h in range(H):
    S, z = 0.0, 0.0
    for t in range(len(x)):
      f_q, f_k = features(mixer.q_map, q[t, h]), features(mixer.k_map, k[t, h])
      if mixer.cfg.sum_norm:
        f_q, f_k = (f / (f.sum() + 1e-4) for f in (f_q, f_k))
      S, z = S + np.outer(f_k, v[t, h]), z + f_k
      scale = len(f_q) ** -0.5
      o[t, h] = scale * (f_q @ S)
      if mixer.cfg.normalize:
        o[t, h] /= scale * (f_q @ z) + 1e-10
  if mixer.cfg.normalize:
    return linear(mixer.out, o.reshape(len(x), -1))
  return head_output(mixer.output, o, x)
