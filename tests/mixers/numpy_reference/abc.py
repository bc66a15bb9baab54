"""Slots are means of all keys and values so far, weighted by e^{s_t}; queries attend to slots."""

import numpy as np

from tests.mixers.numpy_reference import (
  head_output,
  heads,
  linear,
  projections,
  rope,
  softmax,
)

MUTATIONS = [
  ("clamp: float = setting(32.0", "clamp: float = setting(0.5"),
  ("rope_base: float = setting(10000.0", "rope_base: float = setting(100.0"),
  ("jnp.exp(s - z)", "jnp.exp(s)"),
  ("before - z)", "z - before)"),
  ("before - z)", "0.5 * (before - z))"),
  ("scale = self.key_size**-0.5", "scale = 1.0"),
  ("jax.nn.softmax(y, axis=-1)", "jax.nn.softmax(-y, axis=-1)"),
]


def plain(mixer, x):
  qkv, H = mixer.qkv, mixer.heads
  q, k, v = (heads(y, H) for y in projections(qkv, x))
  q, k = rope(q), rope(k)
  weight = np.exp(np.clip(heads(linear(mixer.slots, x), H), -32, 32))
  o = np.zeros_like(v)
  for t in range(len(x)):
    for h in range(H):
      w = weight[: t + 1, h]
      mean = w / w.sum(axis=0)
      slot_keys, slot_values = mean.T @ k[: t + 1, h], mean.T @ v[: t + 1, h]
      o[t, h] = softmax(slot_keys @ q[t, h] / np.sqrt(q.shape[-1])) @ slot_values
  return head_output(mixer.output, o, x)
