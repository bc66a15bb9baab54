"""Fused delta rule forward for NVIDIA GPUs: the state stays on chip over all chunks of a head.

The inverses X and scores P come from triton_gpu_ut.intra, for all chunks in parallel: inside the
loop they would be its longest dependent chain, be repeated by every value block, and spill.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.delta_rule import triton_gpu_chunk as gpu
from pallas_kernels.delta_rule.triton_gpu_tiles import tile_for

F32 = jnp.float32


def _body(*refs, flags, group, scale, block_k, block_v):
  # k [B L H dk], v [B L Hv dv], beta [B L Hv], X [N B Hv parts C C], q like k?, P [N B Hv C C]?,
  # g [B L Hv]?, seg [B L]?, S0 [B Hv dk dv]? -> o [B L Hv dv], S [B Hv dk dv];
  # for the backward, without q and P, R [B L Hv dv], states [N B Hv dk dv] instead
  k_ref, v_ref, beta_ref, X_ref, *refs, out_ref, S_ref = refs
  has_g, has_seg, has_S0, for_backward = flags
  q_ref, P_ref = (None, None) if for_backward else (refs.pop(0), refs.pop(0))
  g_ref, seg_ref, refs = gpu.pick(refs, has_g, has_seg)
  (S0_ref,) = refs if has_S0 else (None,)
  j, h, b, hk = gpu.program_ids(group)
  cols = pl.ds(j * block_v, block_v)
  key_blocks = [pl.ds(i, block_k) for i in range(0, k_ref.shape[-1], block_k)]
  passes = gpu.passes_for(k_ref.dtype)
  chunk = X_ref.shape[-1]

  def step(n, S):
    rows, beta, _, _, decay = gpu.load_chunk(beta_ref, g_ref, seg_ref, n, b, h, chunk)
    KS = QS = 0.0
    for S_i, keys in zip(S, key_blocks):
      KS += gpu.dot(k_ref[b, rows, hk, keys], S_i, passes)
      if not for_backward:
        QS += gpu.dot(q_ref[b, rows, hk, keys], S_i, passes)
    Y = (v_ref[b, rows, h, cols].astype(F32) - gpu.scale_rows(KS, decay.start)) * beta[:, None]
    R, rest = gpu.times_inverse_split(gpu.load_inverse(X_ref, (n, b, h)), Y, passes)
    if for_backward:
      out_ref[b, rows, h, cols] = R.astype(out_ref.dtype)
      for S_i, keys in zip(S, key_blocks):
        S_ref[n, b, h, keys, cols] = S_i.astype(S_ref.dtype)
    else:
      O = gpu.scale_rows(QS, decay.start) * scale
      O += gpu.dot(P_ref[n, b, h, :, :], R, passes, rest=rest)
      out_ref[b, rows, h, cols] = O.astype(out_ref.dtype)
    R, rest = (gpu.scale_rows(x, decay.end) for x in (R, rest))
    new = []
    for S_i, keys in zip(S, key_blocks):
      kept = S_i if decay.whole is None else S_i * decay.whole
      new.append(kept + gpu.dot(k_ref[b, rows, hk, keys], R, passes, gpu.TN, rest))
    return tuple(new)

  if has_S0:
    S = tuple(S0_ref[b, h, keys, cols] for keys in key_blocks)
  else:
    S = tuple(jnp.zeros((block_k, block_v), F32) for _ in key_blocks)
  S = lax.fori_loop(0, k_ref.shape[1] // chunk, step, S)
  if not for_backward:
    for S_i, keys in zip(S, key_blocks):
      S_ref[b, h, keys, cols] = S_i


def _call(kernel, q, k, v, beta, X, P, g, seg, S0, out_shape, *, scale, tile, interpret):
  B, _, H, dk = k.shape
  Hv, dv = v.shape[2:]
  tile = tile or tile_for(kernel, k)
  block_v = min(tile.block_v, dv)
  body = functools.partial(
    _body,
    flags=(g is not None, seg is not None, S0 is not None, kernel == "states"),
    group=Hv // H,
    scale=scale,
    block_k=min(tile.block_k, dk),
    block_v=block_v,
  )
  args = (k, v, beta, X, q, P, g, seg, S0)
  options = dict(grid=(dv // block_v, Hv, B), tile=tile, interpret=interpret)
  return gpu.call(kernel, body, args, out_shape, **options)


def forward(q, k, v, beta, X, P, g, seg, S0, *, scale, tile=None, interpret=False):
  """o = scale q S and the last S; L a multiple of the chunk, head sizes powers of two >= 16."""
  B, _, Hv, dv = v.shape
  out_shape = [
    jax.ShapeDtypeStruct(v.shape, v.dtype),
    jax.ShapeDtypeStruct((B, Hv, k.shape[-1], dv), F32),
  ]
  options = dict(scale=scale, tile=tile, interpret=interpret)
  return _call("fwd", q, k, v, beta, X, P, g, seg, S0, out_shape, **options)


def states(k, v, beta, X, g, seg, S0, *, tile=None, interpret=False):
  """R [B L Hv dv] and the state before each chunk [N B Hv dk dv], both in k's dtype.

  The backward's products round both to k's dtype anyway, so bfloat16 inputs lose nothing by it.
  """
  B, _, Hv, dv = v.shape
  out_shape = [
    jax.ShapeDtypeStruct(v.shape, k.dtype),
    jax.ShapeDtypeStruct((X.shape[0], B, Hv, k.shape[-1], dv), k.dtype),
  ]
  options = dict(scale=1.0, tile=tile, interpret=interpret)
  return _call("states", None, k, v, beta, X, None, g, seg, S0, out_shape, **options)
