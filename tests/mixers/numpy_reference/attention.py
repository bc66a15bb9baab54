"""o_t = sum_{j <= t} softmax_j(q_t . k_j / sqrt(d)) v_j, with or without RoPE."""

import numpy as np

from tests.mixers.numpy_reference import heads, linear, rope, softmax

MUTATIONS = [
  ('10000.0, "Base of', '20000.0, "Base of'),
  ("(rope(y, position, self.cfg.rope_base) for y in (q, k))", "(rope(q, position, 1e4), k)"),
  ("rope(y, position, self", "rope(y, 0 * position, self"),
  ("causal_attention(q, k, v, window=window", "causal_attention(q, k, v, window=3"),
  ("causal_attention(q, k, v", "causal_attention(2 * q, k, v"),
  ("causal_attention(q, k, v", "causal_attention(q, v, k"),
]


def plain(mixer, x):
  H, window = mixer.heads, mixer.cfg.window
  rotate = (lambda y: y) if mixer.cfg.rope_base is None else rope
  q = rotate(heads(linear(mixer.q, x), H))
  k = rotate(heads(linear(mixer.k, x), mixer.kv_heads))
  v = heads(linear(mixer.v, x), mixer.kv_heads)
  o = np.zeros_like(q)
  for t in range(len(x)):
    first = 0 if window is None else max(0, t - window + 1)
    for h in range(H):
      group = h * mixer.kv_heads // H
      scores = k[first : t + 1, group] @ q[t, h] / np.sqrt(q.shape[-1])
      o[t, h] = softmax(scores) @ v[first : t + 1, group]
  return linear(mixer.out, o.reshape(len(x), -1))
