"""Causal attention on NVIDIA GPUs: pads the inputs to tiles and calls the kernels."""

from pallas_kernels.attention.checks import check_inputs
from pallas_kernels.attention.mask_ranges import first_keys, last_queries
from pallas_kernels.attention.pallas_gpu import kernels
from pallas_kernels.attention.pallas_gpu.tiles import power_of_two, tile_for
from pallas_kernels.attention.vjp import differentiable_attention
from pallas_kernels.common.platform import require_platform
from pallas_kernels.common.tiling import pad_axis, round_up


def attention_gpu(q, k, v, segments=None, *, window=None, interpret=False):
  """Return softmax(q k^T / sqrt(d)) v over earlier tokens of the same segment.

  Args:
    q: [B, L, H, d] bfloat16 or float16.
    k, v: [B, L, Hk, d], Hk a divisor of H.
    segments: [B, L] int32, ascending, or None.
    window: number of keys that a token attends to, itself included; None for all.
  """
  check_inputs("pallas_gpu", q, k, v)
  L, d = q.shape[1], q.shape[3]
  size = power_of_two(d)
  tiles = {kernel: tile_for(kernel, L, d) for kernel in ("fwd", "bwd")}
  Lp = round_up(L, max(tile.own for tile in tiles.values()))
  # Padded tokens come last: no real query attends to them.
  pad = lambda x: pad_axis(pad_axis(x, 1, Lp), 3, size)
  unpad = lambda x: x[:, :L, :, :d]
  options = dict(scale=d**-0.5, interpret=interpret)

  def forward(q, k, v, segments, save):
    first = first_keys(segments, q.shape[0], Lp, window)
    o, logsumexp = kernels.forward(
      pad(q), pad(k), pad(v), first, tile=tiles["fwd"], save=save, **options
    )
    return unpad(o), logsumexp

  def backward(q, k, v, segments, o, logsumexp, do):
    first = first_keys(segments, q.shape[0], Lp, window)
    last = last_queries(segments, q.shape[0], Lp, window)
    grads = kernels.backward(
      pad(q), pad(k), pad(v), first, last, pad(o), logsumexp, pad(do), tile=tiles["bwd"], **options
    )
    return [unpad(x) for x in grads]

  q = q if interpret else require_platform(q, "cuda", "attention_gpu")
  return differentiable_attention(forward, backward, q, k, v, segments, window)
