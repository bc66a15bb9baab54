"""S_t = (a_t b_t^T) * S_{t-1} + k_t v_t^T with per-channel sigmoid gates a (keys), b (values)."""

import numpy as np

from tests.mixers.numpy_reference import head_output, heads, linear, projections, sigmoid

MUTATIONS = [
  ("(self.alpha, self.beta))", "(self.beta, self.alpha))"),
  ("jax.nn.log_sigmoid(upcast(gate(x)))", "jax.nn.log_sigmoid(-upcast(gate(x)))"),
  ("jax.nn.log_sigmoid(upcast(gate(x)))", "(jax.nn.log_sigmoid(upcast(gate(x))) / 16)"),
  ("state, h=h)", "state)"),
  ("self.run(q, k, v, g,", "self.run(q, k, v, None,"),
]


def plain(mixer, x):
  qkv, H = mixer.qkv, mixer.heads
  q, k, v = (heads(y, H) for y in projections(qkv, x))
  a, b = (heads(sigmoid(linear(gate, x)), H) for gate in (mixer.alpha, mixer.beta))
  S = np.zeros((H, q.shape[-1], v.shape[-1]))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      S[h] = np.outer(a[t, h], b[t, h]) * S[h] + np.outer(k[t, h], v[t, h])
      o[t, h] = q[t, h] @ S[h] / np.sqrt(q.shape[-1])
  return head_output(mixer.output, o, x)
