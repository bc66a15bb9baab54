"""Short causal convolution, one filter per channel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.norms import wide_dtype
from deltanet_jax.ops.segments import runs


def short_conv(
  x: Float[Array, "B L d"],
  kernel: Float[Array, "W d"],
  *,
  bias: Float[Array, " d"] | None = None,
  state: Float[Array, "B W-1 d"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B L d"], Float[Array, "B W-1 d"]]:
  """y_t = sum_i kernel_i x_{t-W+1+i} + bias; the last tap meets the current token.

  Args:
    state: the W - 1 inputs before the first token, zeros if None. It belongs to the first
      document of a row, the returned one to the last.
    segment_ids: tokens of other documents count as zeros.
  """
  B, L, d = x.shape
  W = kernel.shape[0]
  if state is None:
    state = jnp.zeros((B, W - 1, d), x.dtype)
  if state.shape != (B, W - 1, d):
    raise ValueError(f"state has shape {state.shape}, expected [B, W-1, d] = {[B, W - 1, d]}.")
  padded = jnp.concatenate([state.astype(x.dtype), x], axis=1)
  run = None
  if segment_ids is not None:
    run = runs(segment_ids)
    # The tokens in `state` are of document 0, the first one of the row.
    run = jnp.pad(run, ((0, 0), (W - 1, 0)))
  dtype = wide_dtype(x.dtype)
  y = jnp.zeros((B, L, d), dtype)
  for i in range(W):
    tap = padded[:, i : i + L].astype(dtype) * kernel[i].astype(dtype)[None, None]
    if run is not None and i < W - 1:
      tap = jnp.where((run[:, i : i + L] == run[:, W - 1 :])[..., None], tap, 0)
    y = y + tap
  if bias is not None:
    y = y + bias.astype(dtype)[None, None]
  state = padded[:, L:]
  if run is not None:
    state = jnp.where((run[:, L:] == run[:, -1:])[..., None], state, 0)
  return y.astype(x.dtype), state
