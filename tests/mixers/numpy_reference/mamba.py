"""h_t = e^{dt_t A} h_{t-1} + dt_t B_t u_t per channel and state, y_t = C_t . h_t + D u_t."""

import numpy as np

from tests.mixers.numpy_reference import array, linear, short_conv, silu, softplus

MUTATIONS = [
  ("A = -jnp.exp(self.A_log", "A = -2 * jnp.exp(self.A_log"),
  ("A = -jnp.exp(self.A_log", "A = -jnp.exp(-self.A_log"),
  ("dt, B, C = jnp.split", "dt, C, B = jnp.split"),
  ("jax.nn.softplus(dt + self", "jax.nn.softplus(dt - self"),
  ("D=self.D[...]", "D=2 * self.D[...]"),
  ("* jax.nn.silu(z)", "* jax.nn.sigmoid(z)"),
  ("u, z = jnp.split", "z, u = jnp.split"),
]


def plain(mixer, x):
  into = linear(mixer.into, x)
  channels = into.shape[1] // 2
  u, z = into[:, :channels], into[:, channels:]
  u = silu(short_conv(mixer.conv, u))
  A = -np.exp(array(mixer.A_log))
  rank, N = mixer.dt_kernel.shape[0], A.shape[1]
  selected = linear(mixer.select, u)
  dt = softplus(selected[:, :rank] @ array(mixer.dt_kernel) + array(mixer.dt_bias))
  B, C = selected[:, rank : rank + N], selected[:, rank + N :]
  state = np.zeros((channels, N))
  y = np.zeros_like(u)
  for t in range(len(x)):
    for c in range(channels):
      state[c] = np.exp(dt[t, c] * A[c]) * state[c] + dt[t, c] * B[t] * u[t, c]
      y[t, c] = C[t] @ state[c] + array(mixer.D)[c] * u[t, c]
  return linear(mixer.out, y * silu(z))
