"""A float32 operand as bfloat16 parts, for matrix units that multiply bfloat16."""

import jax.numpy as jnp


def bf16_parts(x, count, rest=None):
  """`count` bfloat16 arrays with the sum x (+ rest, of digits below x's), each 2^-9 of the last."""
  parts = []
  for i in range(count):
    x = x + rest if rest is not None and i + 1 == count else x
    parts.append(x.astype(jnp.bfloat16))
    x = x - parts[-1].astype(jnp.float32)
  return parts
