"""Causal attention on NVIDIA GPUs: the attention of jax's Pallas operators (Triton lowering)."""

import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as library

from pallas_kernels.attention.checks import check_inputs
from pallas_kernels.attention.library import attend
from pallas_kernels.platform import only_on
from pallas_kernels.tiling import pad_axis, round_up

# Tokens of a block, of queries and keys alike: forward, and backward.
BLOCK, BLOCK_BACKWARD = 128, 64


def attention_gpu(q, k, v, documents=None, *, window=None, interpret=False):
  """softmax(q k^T / sqrt(d)) v over the tokens of the same document up to the current one.

  Args:
    q: [B, L, H, d] bfloat16 or float16; k, v: [B, L, Hk, d], Hk a divisor of H.
    documents: [B, L] int32, ascending, or None.
    window: None, or at least L: the kernel has none.
  """
  check_inputs("pallas_gpu", q, k, v, window)
  L, H, d = q.shape[1:]
  Hk = k.shape[2]
  Lp = round_up(L, BLOCK)
  sizes = library.BlockSizes(BLOCK, BLOCK, *[BLOCK_BACKWARD] * 4)

  def settings(warps, residuals):
    """As jax has them in order: .., backward, warps, stages, grid, interpret, debug, residuals."""
    return (d**-0.5, True, sizes, "triton", warps, 2, None, interpret, False, residuals)

  pad = lambda x: pad_axis(x, 1, Lp)

  def inputs(q, k, v, documents):
    # Padded tokens come last: no query that counts sees them.
    ids = None if documents is None else pad_axis(documents, 1, Lp, mode="edge")
    k, v = (jnp.repeat(pad(x), H // Hk, axis=2) for x in (k, v))
    return pad(q), k, v, ids

  def forward(*args, save):
    found = library.mha(*inputs(*args), *settings(None, save))
    o, sums = found if save else (found, None)
    return o[:, :L], sums

  def backward(q, k, v, documents, o, sums, do):
    residuals = (*inputs(q, k, v, documents), pad(o), sums)
    # jax offers this only through its own custom_vjp, which ends at the first order.
    warps = settings(4 if d <= 64 else 8, False)
    dq, dk, dv, _ = library._mha_backward(*warps, residuals, pad(do))

    def own(x):
      x = x[:, :L].reshape(-1, L, Hk, H // Hk, d)
      return x[:, :, :, 0] if Hk == H else x.astype(jnp.float32).sum(3).astype(x.dtype)

    return dq[:, :L], own(dk), own(dv)

  q = q if interpret else only_on(q, "cuda", "attention_gpu")
  return attend(forward, backward, q, k, v, documents, window)
