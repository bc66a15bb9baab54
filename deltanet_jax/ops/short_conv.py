"""Short causal convolution, one filter per channel."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.documents import number_documents
from deltanet_jax.ops.dtypes import wide, wide_dtype
from pallas_kernels.autodiff import backward_by_hand


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
  documents = None if segment_ids is None else number_documents(segment_ids)
  if state is None:
    y, last = _conv(x, kernel, bias, documents), min(L, W - 1)
    after = jnp.pad(x[:, L - last :], ((0, 0), (W - 1 - last, 0), (0, 0)))
    after_documents = (
      None if documents is None else jnp.pad(documents[:, L - last :], ((0, 0), (W - 1 - last, 0)))
    )
  else:
    # The tokens in `state` are of document 0, the first one of the row.
    x = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    documents = None if documents is None else jnp.pad(documents, ((0, 0), (W - 1, 0)))
    y = _filter(x, kernel, bias, documents)[:, W - 1 :].astype(x.dtype)
    after, after_documents = x[:, L:], None if documents is None else documents[:, L:]
  if documents is not None:
    after = jnp.where((after_documents == documents[:, -1:])[..., None], after, 0)
  return y, after


def _shift(x, s):
  """x_{t-s}, zeros where that is outside."""
  return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (s, -s, 0), (0, 0, 0)])


def _same(documents, s, x):
  """x_t where token t - s is of t's document, else 0."""
  if documents is None or s == 0:
    return x
  before = lax.pad(documents, jnp.full((), -1, documents.dtype), [(0, 0, 0), (s, -s, 0)])
  return jnp.where((before == documents)[..., None], x, 0)


def _filter(x, kernel, bias, documents):
  """sum_s kernel_{W-1-s} x_{t-s} + bias, float32 at least."""
  taps = kernel.astype(wide_dtype(x.dtype))[::-1, None, None]
  y = sum(wide(_same(documents, s, _shift(x, s))) * tap for s, tap in enumerate(taps))
  return y if bias is None else y + bias.astype(y.dtype)[None, None]


def _conv_backward(args, d):
  # By hand: autodiff writes the gradient of every tap, in x's dtype, and adds them up after that.
  x, kernel, bias, documents = args
  taps = kernel.astype(wide_dtype(x.dtype))[::-1, None, None]
  dx = sum(wide(_shift(_same(documents, s, d), -s)) * tap for s, tap in enumerate(taps))
  total = lambda y: y.sum(axis=(0, 1))
  dkernel = [total(wide(d) * wide(_same(documents, s, _shift(x, s)))) for s in range(len(taps))]
  dbias = None if bias is None else total(wide(d)).astype(bias.dtype)
  return dx.astype(x.dtype), jnp.stack(dkernel[::-1]).astype(kernel.dtype), dbias, None


@backward_by_hand(_conv_backward)
def _conv(x, kernel, bias, documents):
  return _filter(x, kernel, bias, documents).astype(x.dtype)
