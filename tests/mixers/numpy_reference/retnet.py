"""S_t = (1 - 2^(-5-h)) S_{t-1} + k_t v_t^T in head h = 0, 1, .., with RoPE."""

import numpy as np

from tests.mixers.numpy_reference import convolved, head_output, heads, rope

MUTATIONS = [
  ('"silu" if cfg.conv else "identity"', '"identity"'),
  ("2.0 ** (-5 - np.arange(H))", "2.0 ** (-6 - np.arange(H))"),
  ("2.0 ** (-5 - np.arange(H))", "2.0 ** (-5.0 * np.ones(H))"),
  ("2.0 ** (-5 - np.arange(H))", "2.0 ** (-5 - np.arange(H)[::-1])"),
  ("np.log1p(-(2.0", "np.log1p((2.0"),
  ("rope_base: float = setting(10000.0", "rope_base: float = setting(1000.0"),
  ("rope(y, position, self", "rope(y, 0 * position, self"),
]


def plain(mixer, x):
  H, qkv = mixer.heads, mixer.qkv
  q, k, v = (heads(y, H) for y in convolved(qkv, x))
  q, k = rope(q), rope(k)
  S = np.zeros((H, q.shape[-1], v.shape[-1]))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      S[h] = (1 - 2.0 ** (-5 - h)) * S[h] + np.outer(k[t, h], v[t, h])
      o[t, h] = q[t, h] @ S[h] / np.sqrt(q.shape[-1])
  return head_output(mixer.output, o, x)
