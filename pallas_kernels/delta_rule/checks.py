"""What the kernels of the delta rule take."""

import jax.numpy as jnp

from pallas_kernels.tiling import MAX_KEY_SIZE, MAX_VALUE_SIZE


def check_inputs(q, k, v, beta, g):
  """Refuses what no kernel takes; the last axes of q, k, v are [heads, head size]."""
  (H, dk), (Hv, dv) = k.shape[-2:], v.shape[-2:]
  if Hv % H:
    raise ValueError(f"value heads {Hv} are not a multiple of key heads {H}")
  if dk > MAX_KEY_SIZE or dv > MAX_VALUE_SIZE:
    raise ValueError(
      f"a kernel takes keys of up to {MAX_KEY_SIZE} and values of up to {MAX_VALUE_SIZE} channels,"
      f' got {dk} and {dv}; use implementation="chunkwise"'
    )
  if not q.dtype == k.dtype == v.dtype or v.dtype not in (jnp.bfloat16, jnp.float32):
    raise ValueError(f"q, k, v must share bfloat16 or float32: {q.dtype}, {k.dtype}, {v.dtype}")
  if g is not None and g.ndim != beta.ndim:
    raise ValueError(
      f"a kernel takes one gate per value head, g of beta's shape {beta.shape}, got {g.shape}; for"
      ' gates per key channel use implementation="chunkwise"'
    )
