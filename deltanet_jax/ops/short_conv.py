"""Short causal convolution, one filter per channel."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.norms import wide, wide_dtype
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
  if state is not None and state.shape != (B, W - 1, d):
    raise ValueError(f"state has shape {state.shape}, expected [B, W-1, d] = {[B, W - 1, d]}.")
  run = None if segment_ids is None else runs(segment_ids)
  if state is None:
    y, last = _conv(x, kernel, bias, run), min(L, W - 1)
    after = jnp.pad(x[:, L - last :], ((0, 0), (W - 1 - last, 0), (0, 0)))
    after_run = None if run is None else jnp.pad(run[:, L - last :], ((0, 0), (W - 1 - last, 0)))
  else:
    # The tokens in `state` are of document 0, the first one of the row.
    x = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    run = None if run is None else jnp.pad(run, ((0, 0), (W - 1, 0)))
    y = _filter(x, kernel, bias, run)[:, W - 1 :].astype(x.dtype)
    after, after_run = x[:, L:], None if run is None else run[:, L:]
  if run is not None:
    after = jnp.where((after_run == run[:, -1:])[..., None], after, 0)
  return y, after


def _shift(x, s):
  """x_{t-s}, zeros where that is outside."""
  return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (s, -s, 0), (0, 0, 0)])


def _same(run, s, x):
  """x_t where token t - s is of t's document, else 0."""
  if run is None or s == 0:
    return x
  before = lax.pad(run, jnp.full((), -1, run.dtype), [(0, 0, 0), (s, -s, 0)])
  return jnp.where((before == run)[..., None], x, 0)


def _filter(x, kernel, bias, run):
  """sum_s kernel_{W-1-s} x_{t-s} + bias, float32 at least."""
  taps = kernel.astype(wide_dtype(x.dtype))[::-1, None, None]
  y = sum(wide(_same(run, s, _shift(x, s))) * tap for s, tap in enumerate(taps))
  return y if bias is None else y + bias.astype(y.dtype)[None, None]


@jax.custom_vjp
def _conv(x, kernel, bias, run):
  return _filter(x, kernel, bias, run).astype(x.dtype)


def _conv_fwd(x, kernel, bias, run):
  return _conv(x, kernel, bias, run), (x, kernel, bias, run)


def _conv_bwd(residuals, d):
  # By hand: autodiff writes the gradient of every tap, in x's dtype, and adds them up after that.
  x, kernel, bias, run = residuals
  taps = kernel.astype(wide_dtype(x.dtype))[::-1, None, None]
  dx = sum(wide(_shift(_same(run, s, d), -s)) * tap for s, tap in enumerate(taps))
  total = lambda y: y.sum(axis=(0, 1))
  dkernel = [total(wide(d) * wide(_same(run, s, _shift(x, s)))) for s in range(len(taps))]
  dbias = None if bias is None else total(wide(d)).astype(bias.dtype)
  return dx.astype(x.dtype), jnp.stack(dkernel[::-1]).astype(kernel.dtype), dbias, None


_conv.defvjp(_conv_fwd, _conv_bwd)
