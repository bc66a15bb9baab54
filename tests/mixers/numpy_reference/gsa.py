"""Slots keep a_t and take 1 - a_t of each key and value; a query attends to them."""

import numpy as np

from tests.mixers.numpy_reference import heads, linear, rms_norm, sigmoid, silu

MUTATIONS = [
  ("gate_temperature: float = 8.0", "gate_temperature: float = 4.0"),
  ("-jnp.expm1(g), g,", "jnp.exp(g), g,"),
  ("-jnp.expm1(g), g,", "-jnp.expm1(g), 2 * g,"),
  ("state, scale=1.0)", "state, scale=0.5)"),
  ("jax.nn.silu(merge_heads(o))", "merge_heads(o)"),
  ("q, k, v = (jax.nn.silu(y) for y in (q, k, v))", "pass"),
  ("h=g, scale=scale", "h=None, scale=scale"),
  ("norm_eps: float = 1e-5", "norm_eps: float = 1e-3"),
]


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def plain(mixer, x):
  qkv, H = mixer.qkv, mixer.heads
  q, k, v = (heads(silu(linear(into, x)), H) for into in (qkv.q, qkv.k, qkv.v))
  a = heads(sigmoid(linear(mixer.slots, x)) ** (1 / 8), H)
  M = a.shape[-1]
  slot_keys, slot_values = np.zeros((H, M, q.shape[-1])), np.zeros((H, M, v.shape[-1]))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      keep = a[t, h][:, None]
      slot_keys[h] = keep * slot_keys[h] + (1 - keep) * k[t, h]
      slot_values[h] = keep * slot_values[h] + (1 - keep) * v[t, h]
      o[t, h] = softmax(slot_keys[h] @ q[t, h]) @ slot_values[h]
  return linear(mixer.out, rms_norm(silu(o.reshape(len(x), -1)), mixer.norm.scale, 1e-5))
