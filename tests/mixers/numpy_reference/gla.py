"""S_t = Diag(a_t) S_{t-1} + k_t v_t^T with the per-channel decay a_t = sigmoid(.)^(1/16)."""

import numpy as np

from tests.mixers.numpy_reference import convolved, head_output, heads, linear, sigmoid

MUTATIONS = [
  ('16.0, "Temperature', '1.0, "Temperature'),
  (" / self.cfg.gate_temperature", ""),
  ("jax.nn.log_sigmoid(gate)", "jax.nn.log_sigmoid(-gate)"),
  ('"silu" if cfg.conv else "identity"', '"identity"'),
  ("self.run(q, k, v, g,", "self.run(q, k, v, g[..., 0],"),
]


def plain(mixer, x):
  qkv, H = mixer.qkv, mixer.heads
  q, k, v = (heads(y, H) for y in convolved(qkv, x))
  decay = heads(sigmoid(linear(mixer.decay_up, linear(mixer.decay_down, x))) ** (1 / 16), H)
  S = np.zeros((H, q.shape[-1], v.shape[-1]))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      S[h] = decay[t, h][:, None] * S[h] + np.outer(k[t, h], v[t, h])
      o[t, h] = q[t, h] @ S[h] / np.sqrt(q.shape[-1])
  return head_output(mixer.output, o, x)
