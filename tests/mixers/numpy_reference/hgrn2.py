"""S_t = Diag(a_t) S_{t-1} + (1 - a_t) v_t, o_t = dk^-1/2 q_t S_t, a = gamma + (1-gamma) sigmoid."""

import numpy as np

from tests.mixers.numpy_reference import heads, linear, rms_norm, short_conv, sigmoid, silu


def plain(mixer, x, gamma=0.0):
  """Args: gamma: the lower bound `[D]` of the layer."""
  p, H, L = mixer.qkv, mixer.heads, len(x)
  q = heads(silu(short_conv(p.q_conv, linear(p.q, x))), H)
  a = gamma + (1 - gamma) * sigmoid(short_conv(p.k_conv, linear(p.k, x)))
  a, v = heads(a, H), heads(short_conv(p.v_conv, linear(p.v, x)), H)
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
  ("norm_eps: float = 1e-5", "norm_eps: float = 1e-3"),
  ("jax.nn.silu(q)", "jax.nn.sigmoid(q)"),
  ("self.norm(merge_heads(o))", "merge_heads(o)"),
]
