"""S_t = e^{dt_t A} S_{t-1} + B_t (dt_t u_t), y_t = C_t S_t + D u_t; gate, norm, output."""

import numpy as np

from tests.mixers.numpy_reference import array, heads, linear, short_conv, silu, softplus


def plain(mixer, x):
  u = silu(short_conv(mixer.value_conv, linear(mixer.value, x)))
  BC = silu(short_conv(mixer.BC_conv, linear(mixer.BC, x)))
  dt = softplus(linear(mixer.dt, x) + array(mixer.dt_bias))
  A, D = -np.exp(array(mixer.A_log)), array(mixer.D)
  H, G, L = len(A), mixer.cfg.groups, len(x)
  u, BC = heads(u, H), BC.reshape(L, 2, G, -1)
  y = np.zeros_like(u)
  S = np.zeros((H, BC.shape[-1], u.shape[-1]))
  for t in range(L):
    for h in range(H):
      B, C = BC[t, :, h // (H // G)]
      S[h] = np.exp(dt[t, h] * A[h]) * S[h] + np.outer(B, dt[t, h] * u[t, h])
      y[t, h] = C @ S[h] + D[h] * u[t, h]
  y = y.reshape(L, -1) * silu(linear(mixer.gate, x))
  y = heads(y, G)
  y = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + 1e-6)
  return linear(mixer.out, y.reshape(L, -1) * array(mixer.scale))


MUTATIONS = [
  ("g = -jnp.exp", "g = -0.5 * jnp.exp"),
  ("v = (dt[..., None] * u", "v = (u"),
  ("scale=1.0", "scale=None"),
  ("y = y + over_tokens(self.D)", "y = y - over_tokens(self.D)"),
  ("self.run(C, B, v", "self.run(B, C, v"),
  ("jax.nn.silu(self.gate(x))", "jax.nn.sigmoid(self.gate(x))"),
  ("size = y.shape[-1] // self.cfg.groups", "size = y.shape[-1] // self.cfg.groups // 2"),
]
