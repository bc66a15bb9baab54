"""Causal attention on TPU: splash attention as jax ships it."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pallas_kernels.attention.checks import check_inputs
from pallas_kernels.attention.library import attend
from pallas_kernels.platform import only_on
from pallas_kernels.tiling import LANES, pad_axis, round_up

# Tokens of a block. Keys and values are read once for every block of queries: at 128 a v5e would
# wait for memory (32 KiB per 4.2 MFLOP of d = 64), at 512 it has four times the work to do.
_BLOCKS = (512, 256, 128)


def choose_block(length: int) -> int:
  """The largest block that pads `length` by no more than an eighth over the least."""
  least = round_up(length, LANES)
  return next(n for n in _BLOCKS if round_up(length, n) * 8 <= least * 9)


def _kernel(length, heads, window, block, **options):
  if window is None or window >= length:
    mask = masks.CausalMask((length, length))
  else:
    mask = masks.LocalMask((length, length), (window - 1, 0), 0)
  layout = splash.QKVLayout.SEQ_MINOR
  sizes = splash.BlockSizes(
    **dict.fromkeys(_FORWARD_BLOCKS + _BACKWARD_BLOCKS, block),
    q_layout=layout,
    k_layout=layout,
    v_layout=layout,
  )
  return splash.make_splash_mha(
    masks.MultiHeadMask([mask] * heads),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
    **options,
  )


_FORWARD_BLOCKS = ("block_q", "block_kv", "block_kv_compute")
_BACKWARD_BLOCKS = (
  "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq",
)  # fmt: skip


def _tokens_last(x):
  """[B L H d] as it is, with tokens in the lanes: a head of 64 channels would fill half of them."""
  return with_layout_constraint(x, Layout(major_to_minor=(0, 2, 3, 1)))


def attention_tpu(q, k, v, documents=None, *, window=None, interpret=False):
  """softmax(q k^T / sqrt(d)) v over the tokens of the same document up to the current one.

  Args:
    q: [B, L, H, d] bfloat16; k, v: [B, L, Hk, d], Hk a divisor of H.
    documents: [B, L] int32, ascending, or None.
    window: how many keys a token sees, its own included; None is all.
  """
  check_inputs("pallas_tpu", q, k, v, window)
  L, H, d = q.shape[1:]
  block = choose_block(L)
  Lp = round_up(L, block)
  options = dict(length=Lp, heads=H, window=window, block=block, interpret=interpret)
  heads_first = lambda x: pad_axis(x.swapaxes(1, 2), 2, Lp)
  tokens_first = lambda x: x.swapaxes(1, 2)[:, :L]
  lay_out = (lambda x: x) if interpret else _tokens_last

  def inputs(q, k, v, documents):
    # Padded tokens come last: no query that counts sees them.
    ids = None if documents is None else pad_axis(documents, 1, Lp, mode="edge")
    ids = None if ids is None else splash.SegmentIds(ids, ids)
    scaled = (q.astype(jnp.float32) * d**-0.5).astype(q.dtype)
    return heads_first(scaled), heads_first(k), heads_first(v), ids

  def forward(*args, save):
    kernel = _kernel(save_residuals=save, **options)
    found = jax.vmap(kernel)(*inputs(*args))
    o, sums = (found[0], found[1][0]) if save else (found, None)
    return tokens_first(o), sums

  def backward(q, k, v, documents, o, sums, do):
    kernel = _kernel(**options)
    names = ("save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name")
    names += ("mask_function", "attn_logits_soft_cap", "interpret")
    settings = [kernel.kwargs[name] for name in names]

    def row(q, k, v, ids, o, sums, do):
      residuals = (q, k, v, ids, None, o, sums, kernel.dq_mask_info, kernel.dkv_mask_info)
      # jax offers this only through its own custom_vjp, which ends at the first order.
      return splash._splash_attention_bwd(*settings, residuals, do)[3:6]

    args = inputs(q, k, v, documents)
    grads = jax.vmap(row)(*args, heads_first(o), sums, heads_first(do))
    dq, dk, dv = (lay_out(tokens_first(x)) for x in grads)
    return (dq.astype(jnp.float32) * d**-0.5).astype(q.dtype), dk, dv

  q = q if interpret else only_on(q, "tpu", "attention_tpu")
  return attend(forward, backward, q, k, v, documents, window)
