"""Split float32 operands into bfloat16 parts, and decide how many parts a matmul uses."""

import jax.numpy as jnp

# Precision -> bfloat16 parts of an operand. n parts take n (n + 1) / 2 bfloat16 matmuls, which is
# the number in the name. Forward substitution uses no matmuls.
PARTS = {"bf16": 1, "bf16x3": 2, "bf16x6": 3, "substitution": 0}


def parts_for(dtype) -> int:
  """Return the number of bfloat16 parts of an operand: 3 for float32 (24 bits), 1 for bfloat16.

  Two parts of a float32 would hold only about 16 of its 24 bits.
  """
  return PARTS["bf16x6" if dtype == jnp.float32 else "bf16"]


def inverse_precision(name: str | None, dtype) -> str:
  """Return the precision of (I + A)^-1: `name`, or the default for inputs of this dtype if None.

  The default for bfloat16 inputs is bf16, because X is rounded to bfloat16 afterwards. A more exact
  inverse gains little with beta up to 2 (error of o 6.0e-3 to 5.2e-3), makes the forward pass 1/6
  slower and is worse for nearly identical keys.
  """
  if name is None:
    return "bf16x6" if dtype == jnp.float32 else "bf16"
  if name not in PARTS:
    raise ValueError(f"inverse_precision is {name!r}, expected one of {', '.join(PARTS)}.")
  return name


def bf16_parts(x, count, residual=None):
  """Split x into `count` bfloat16 arrays whose sum is x, each about 2^-9 of the one before.

  `residual` holds digits of x below float32; it is added to the last part.
  """
  parts = []
  for i in range(count):
    x = x + residual if residual is not None and i + 1 == count else x
    parts.append(x.astype(jnp.bfloat16))
    x = x - parts[-1].astype(jnp.float32)
  return parts
