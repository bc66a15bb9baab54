"""S_t = f_t S_{t-1} + i_t k_t v_t, z_t with 1 for v_t, o_t = q_t S_t / max(|q_t z_t|, 1)."""

import numpy as np

from tests.mixers.numpy_reference import array, heads, linear, projections, sigmoid


def plain(mixer, x):
  H, L = mixer.heads, len(x)
  q, k, v = (heads(y, H) for y in projections(mixer.qkv, x))
  i = 15 * np.tanh((linear(mixer.input, x) + array(mixer.input_bias)) / 15)
  f = 15 * np.tanh((linear(mixer.forget, x) + array(mixer.forget_bias)) / 15)
  log_f = np.log(sigmoid(f))
  S = np.zeros((H, k.shape[-1], v.shape[-1]))
  z, m = np.zeros((H, k.shape[-1])), np.zeros(H)
  o = np.zeros_like(v)
  for t in range(L):
    for h in range(H):
      # S, z and the 1 in the denominator are divided by e^m.
      m_before, m[h] = m[h], max(log_f[t, h] + m[h], i[t, h])
      decay, write = np.exp(log_f[t, h] + m_before - m[h]), np.exp(i[t, h] - m[h])
      key = k[t, h] / np.sqrt(k.shape[-1])
      S[h] = decay * S[h] + write * np.outer(key, v[t, h])
      z[h] = decay * z[h] + write * key
      o[t, h] = q[t, h] @ S[h] / (max(abs(q[t, h] @ z[h]), np.exp(-m[h])) + 1e-6)
  o = o - o.mean(axis=-1, keepdims=True)
  o = o / np.sqrt((o * o).mean(axis=-1, keepdims=True) + 1e-6)
  y = o.reshape(L, -1) * array(mixer.norm.scale)
  return linear(mixer.out, sigmoid(linear(mixer.gate, x)) * y)


MUTATIONS = [
  ("jnp.exp(log_i - m)", "jnp.exp(m - log_i)"),
  ("log_f + before - m", "log_f + m - before"),
  ("jnp.exp(-m)[..., None]", "jnp.exp(m)[..., None]"),
  ("gate_cap: float = setting(15.0", "gate_cap: float = setting(14.0"),
  ("jax.nn.log_sigmoid(capped", "jnp.negative(capped"),
  ("jax.nn.sigmoid(self.gate(x))", "jax.nn.silu(self.gate(x))"),
]
