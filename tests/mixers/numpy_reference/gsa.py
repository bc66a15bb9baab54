"""Slots are moving averages of keys and values with decay a_t; queries attend to the slots."""

import numpy as np

from tests.mixers.numpy_reference import (
  heads,
  linear,
  projections,
  rms_norm,
  sigmoid,
  silu,
  softmax,
)

MUTATIONS = [
  ('8.0, "Temperature', '4.0, "Temperature'),
  ("-jnp.expm1(g), g,", "jnp.exp(g), g,"),
  ("-jnp.expm1(g), g,", "-jnp.expm1(g), 2 * g,"),
  ("state, scale=1.0)", "state, scale=0.5)"),
  ("jax.nn.silu(merge_heads(o))", "merge_heads(o)"),
  ("q, k, v = (jax.nn.silu(y) for y in (q, k, v))", "pass"),
  ("h=g, scale=scale", "h=None, scale=scale"),
  ("norm_eps: float = setting(1e-5", "norm_eps: float = setting(1e-3"),
]


def plain(mixer, x):
  qkv, H = mixer.qkv, mixer.heads
  q, k, v = (heads(silu(y), H) for y in projections(qkv, x))
  a = heads(sigmoid(linear(mixer.slots, x)) ** (1 / 8), H)
  M = a.shape[-1]
  slot_keys, slot_values = np.zeros((H, M, q.shape[-1])), np.zeros((H, M, v.shape[-1]))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      decay = a[t, h][:, None]
      slot_keys[h] = decay * slot_keys[h] + (1 - decay) * k[t, h]
      slot_values[h] = decay * slot_values[h] + (1 - decay) * v[t, h]
      o[t, h] = softmax(slot_keys[h] @ q[t, h]) @ slot_values[h]
  return linear(mixer.out, rms_norm(silu(o.reshape(len(x), -1)), mixer.norm.scale, 1e-5))
