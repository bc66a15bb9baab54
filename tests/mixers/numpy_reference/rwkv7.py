"""S_t = Diag(a_t) S_{t-1} - (eta_t kappa_t)^T (kappa_t S_{t-1}) + k_t^T v_t, with a bonus."""

import numpy as np

from tests.mixers.numpy_reference import array, heads, l2_norm, linear, sigmoid

MUTATIONS = [
  ("w = -math.exp(-0.5)", "w = -math.exp(0.5)"),
  ("eta = gate_activation(", "eta = 2 * gate_activation("),
  ("k * channels(self.erased", "-k + channels(self.erased"),
  ("(1 + (eta - 1)", "(1 - (eta - 1)"),
  ("self.norm(o) + merge_heads", "self.norm(o) - merge_heads"),
  ("2.5, jnp.tanh)", "2.5)"),
]


def plain(mixer, x):
  H, d = mixer.heads, mixer.key_size
  previous = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
  x_r, x_w, x_k, x_v, x_a, x_g = (x + (previous - x) * share for share in array(mixer.shares))
  low_rank = lambda layer, x, act: linear(layer.up, act(linear(layer.down, x)))
  r, k, v = linear(mixer.r, x_r), linear(mixer.k, x_k), linear(mixer.v, x_v)
  w = sigmoid(low_rank(mixer.decay, x_w, np.tanh) + array(mixer.decay_bias))
  decay = heads(np.exp(-0.6065306597126334 * w), H)
  eta = sigmoid(low_rank(mixer.rate, x_a, lambda y: y) + array(mixer.rate_bias))
  gate = low_rank(mixer.gate, x_g, sigmoid)
  kappa = l2_norm(heads(k * array(mixer.erased), H))
  k = heads(k * (1 + (eta - 1) * array(mixer.written)), H)
  r, v, eta, rho = heads(r, H), heads(v, H), heads(eta, H), array(mixer.bonus).reshape(H, d)
  scale, bias = array(mixer.norm.scale).reshape(H, d), array(mixer.norm.bias).reshape(H, d)
  S = np.zeros((H, d, d))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      read = kappa[t, h] @ S[h]
      S[h] *= decay[t, h][:, None]
      S[h] += np.outer(k[t, h], v[t, h]) - np.outer(eta[t, h] * kappa[t, h], read)
      y = r[t, h] @ S[h]
      y = (y - y.mean()) / np.sqrt(y.var() + 1e-5 * d)
      o[t, h] = y * scale[h] + bias[h] + (r[t, h] * rho[h]) @ k[t, h] * v[t, h]
  return linear(mixer.out, o.reshape(len(x), -1) * gate)
