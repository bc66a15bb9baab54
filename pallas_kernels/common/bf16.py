"""A float32 factor as bfloat16 parts, and how many of them the products of kernels take."""

import jax.numpy as jnp

# Precision -> bfloat16 parts of a factor; n parts are n (n + 1) / 2 products, their name's number.
# Substitution multiplies no matrices.
PARTS = {"bf16": 1, "bf16x3": 2, "bf16x6": 3, "substitution": 0}


def parts_for(dtype) -> int:
  """Parts of a factor of this dtype. Two of float32's three would keep about 16 bits of 24."""
  return PARTS["bf16x6" if dtype == jnp.float32 else "bf16"]


def inverse_precision(name: str | None, dtype) -> str:
  """The precision `name` of an inverse, or what inputs of this dtype deserve if it is None.

  Of bfloat16 inputs X is rounded to bfloat16 in the end: a more exact one gains little with beta up
  to 2 (o 6.0e-3 to 5.2e-3), costs a sixth of the forward, and is worse on nearly identical keys.
  """
  if name is None:
    return "bf16x6" if dtype == jnp.float32 else "bf16"
  if name not in PARTS:
    raise ValueError(f"inverse_precision {name!r} is none of {', '.join(PARTS)}")
  return name


def bf16_parts(x, count, rest=None):
  """`count` bfloat16 arrays with the sum x (+ rest, of digits below x's), each 2^-9 of the last."""
  parts = []
  for i in range(count):
    x = x + rest if rest is not None and i + 1 == count else x
    parts.append(x.astype(jnp.bfloat16))
    x = x - parts[-1].astype(jnp.float32)
  return parts
