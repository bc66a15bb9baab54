"""x_t = e^{dt A} x_{t-1} + (e^{dt A} - 1) / A u_t, y_t = 2 Re(C x_t) + D u_t; then GELU and GLU."""

import math

import numpy as np

from tests.mixers.numpy_reference import array, linear, sigmoid

MUTATIONS = [
  ("lax.complex(-jnp.exp(A_log), A_imag)", "lax.complex(-2 * jnp.exp(A_log), A_imag)"),
  ("lax.complex(-jnp.exp(A_log), A_imag)", "lax.complex(-jnp.exp(A_log), -A_imag)"),
  ("jnp.expm1(log_A) / A", "jnp.expm1(log_A)"),
  ("jnp.expm1(log_A) / A", "jnp.exp(log_A) / A"),
  ("+ D[None, None] * x", "- D[None, None] * x"),
  ("approximate=False", "approximate=True"),
  ("y, gate = jnp.split", "gate, y = jnp.split"),
]


def plain(mixer, x):
  A = -np.exp(array(mixer.A_log)) + 1j * array(mixer.A_imag)
  C = array(mixer.C)[..., 0] + 1j * array(mixer.C)[..., 1]
  dt = np.exp(array(mixer.log_dt))[:, None]
  state, y = np.zeros_like(A), np.zeros_like(x)
  for t in range(len(x)):
    state = np.exp(dt * A) * state + (np.exp(dt * A) - 1) / A * x[t][:, None]
    y[t] = 2 * (C * state).sum(axis=1).real + array(mixer.D) * x[t]
  gelu = np.vectorize(lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2)
  value, gate = np.split(linear(mixer.out, gelu(y)), 2, axis=1)
  return value * sigmoid(gate)
