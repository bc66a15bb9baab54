"""S_t = Diag(a_t) S_{t-1} + (1 - a_t) v_t, o_t = dk^-1/2 q_t S_t, a = gamma + (1-gamma) sigmoid."""

import numpy as np

from tests.mixers.numpy_reference import heads, linear, projections, rms_norm, sigmoid, silu


def plain(mixer, x, gamma=0.0):
  """Args: gamma: lower bound `[D]` of the decay."""
  H, L = mixer.heads, len(x)
  q, f, v = projections(mixer.qkv, x)
  a = gamma + (1 - gamma) * sigmoid(f)
  q, a, v = heads(silu(q), H), heads(a, H), heads(v, H)
  o = np.zeros_like(v)
  S = np.zeros((H, a.shape[-1], v.shape[-1]))
  for t in range(L):
    for h in range(H):
      S[h] = a[t, h][:, None] * S[h] + np.outer(1 - a[t, h], v[t, h])
      o[t, h] = q[t, h] @ S[h] / np.sqrt(a.shape[-1])
  return linear(mixer.out, rms_norm(o.reshape(L, -1), mixer.norm.scale, 1e-5))


MUTATIONS = [
  ("jax.nn.log_sigmoid(f), jax.nn.sigmoid(-f)", "jax.nn.log_sigmoid(f), jax.nn.sigmoid(f)"),
  ("kept, forgotten = jax.nn.log_sigmoid(f)", "kept, forgotten = jax.nn.log_sigmoid(-f)"),
  ("norm_eps: float = setting(1e-5", "norm_eps: float = setting(1e-3"),
  ("jax.nn.silu(q)", "jax.nn.sigmoid(q)"),
  ("self.norm(merge_heads(o))", "merge_heads(o)"),
]
