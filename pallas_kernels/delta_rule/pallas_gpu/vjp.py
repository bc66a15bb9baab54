"""Differentiable delta rule on NVIDIA GPUs (Pallas, Triton lowering).

fused=True: one program per (head, value block, sequence) carries the state over all chunks.
fused=False: the paper's design, a UT-transform kernel over all chunks, then lax.scan for the state.
For the backward the fused form keeps its inputs and the inverses X (C/dk of k's size), the other
its inputs alone; scores, R and per-chunk states are recomputed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.delta_rule import triton_gpu_bwd as bwd
from pallas_kernels.delta_rule import triton_gpu_fwd as fwd
from pallas_kernels.delta_rule import triton_gpu_ut as ut
from pallas_kernels.delta_rule.checks import check_inputs
from pallas_kernels.delta_rule.triton_gpu_tiles import MAX_CHUNK
from pallas_kernels.tiling import pad_axis, round_up

F32 = jnp.float32


class _Options(NamedTuple):
  scale: float
  chunk: int
  inverse_precision: str
  interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _fused(q, k, v, beta, g, seg, S0, options):
  return _fused_fwd(q, k, v, beta, g, seg, S0, options)[0]


def _fused_fwd(q, k, v, beta, g, seg, S0, options):
  P, X = ut.intra(
    q, k, beta, g, seg,
    scale=options.scale,
    chunk=options.chunk,
    inverse_precision=options.inverse_precision,
    interpret=options.interpret,
  )  # fmt: skip
  out = fwd.forward(
    q, k, v, beta, X, P, g, seg, S0,
    scale=options.scale,
    interpret=options.interpret,
  )  # fmt: skip
  return tuple(out), (q, k, v, beta, g, seg, S0, X)


def _fused_bwd(options, residuals, cotangents):
  q, k, v, beta, g, seg, S0, X = residuals
  do, dS = cotangents
  scale, interpret = options.scale, options.interpret
  (P,) = ut.intra(
    q, k, beta, g, seg,
    scale=scale,
    chunk=options.chunk,
    inverse_precision=None,
    interpret=interpret,
  )  # fmt: skip
  R, states = fwd.states(k, v, beta, X, g, seg, S0, interpret=interpret)
  dY, dstates, dS0 = bwd.dstates(
    q, k, v, beta, X, P, g, seg, do, dS, scale=scale, interpret=interpret
  )
  dq, dk, dv, dbeta, dg = bwd.grads(
    q, k, v, beta, g, seg, P, R, dY, do, states, dstates,
    scale=scale,
    interpret=interpret,
  )  # fmt: skip
  return dq, dk, dv, dbeta, dg, None, dS0 if S0 is not None else None


_fused.defvjp(_fused_fwd, _fused_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def ut_pallas(k, v, beta, g, seg, options):
  """(W, U) of every chunk, differentiable; the backward recomputes the inverse."""
  return _ut_pallas_fwd(k, v, beta, g, seg, options)[0]


def _ut_pallas_fwd(k, v, beta, g, seg, options):
  _, W, U = ut.ut_transform(
    k, v, beta, g, seg,
    chunk=options.chunk,
    inverse_precision=options.inverse_precision,
    interpret=options.interpret,
  )  # fmt: skip
  return (W, U), (k, v, beta, g, seg)


def _ut_pallas_bwd(options, residuals, cotangents):
  k, v, beta, g, seg = residuals
  X, W, U = ut.ut_transform(
    k, v, beta, g, seg,
    chunk=options.chunk,
    inverse_precision=options.inverse_precision,
    interpret=options.interpret,
  )  # fmt: skip
  grads = ut.ut_transform_bwd(
    k, v, beta, g, seg, X, W, U, *cotangents, chunk=options.chunk, interpret=options.interpret
  )
  return *grads, None


ut_pallas.defvjp(_ut_pallas_fwd, _ut_pallas_bwd)


def einsum(spec, a, b):
  # bfloat16 inputs: one bf16 product, as in the kernels. float32: IEEE, never TF32.
  precision = lax.Precision.HIGHEST if a.dtype == F32 else None
  return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=F32)


def by_chunks(x, chunk):
  """[B L ...] -> [N B ... C ...]: chunks lead for the scan, heads before tokens."""
  B, L = x.shape[:2]
  x = jnp.moveaxis(x.reshape(B, L // chunk, chunk, *x.shape[2:]), 1, 0)
  return jnp.moveaxis(x, 2, 3) if x.ndim > 3 else x


def chunk_decays(g, seg, N, B, chunk):
  """Decays of all chunks: inside [N B Hv C C], start and end [N B Hv C], whole [N B Hv]."""
  lower = np.tril(np.ones((chunk, chunk), bool))
  keep = jnp.broadcast_to(lower, (N, B, 1, chunk, chunk))
  start = end = jnp.ones((N, B, 1, chunk), F32)
  whole = jnp.ones((N, B, 1), F32)
  if seg is not None:
    s = by_chunks(seg, chunk)[:, :, None]  # [N B 1 C]
    carried = jnp.concatenate([s[:1, ..., 0], s[:-1, ..., -1]])
    keep = keep & (s[..., :, None] == s[..., None, :])
    start = (s == carried[..., None]).astype(F32)
    end = (s == s[..., -1:]).astype(F32)
    whole = (carried == s[..., -1]).astype(F32)
  inside = jnp.where(keep, 1.0, 0.0)
  if g is not None:
    gs = by_chunks(g.astype(F32), chunk)  # [N B Hv C]
    # Sums over the tokens in between, not differences of cumulative sums, as load_decay has it.
    between = jnp.cumsum(jnp.where(np.tril(lower, -1), gs[..., None], 0.0), axis=-2)
    inside = inside * jnp.exp(between)
    start = start * jnp.exp(jnp.cumsum(gs, axis=-1))
    end = end * jnp.exp(lax.cumsum(gs, axis=gs.ndim - 1, reverse=True) - gs)
    whole = whole * jnp.exp(jnp.sum(gs, axis=-1))
  return inside, start, end, whole


def scan_chunks(q, k, v, beta, g, seg, S0, options, transform):
  """The paper's design: (W, U) = transform(...) for all chunks at once, then a scan for S."""
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  C, N = options.chunk, L // options.chunk
  dtype = k.dtype
  W, U = transform(k, v, beta, g, seg, options)
  inside, start, end, whole = chunk_decays(g, seg, N, B, C)
  Q, K = by_chunks(q, C), by_chunks(k, C)
  heads = lambda x: jnp.repeat(x, Hv // H, axis=2)
  P = (heads(einsum("nbhck,nbhdk->nbhcd", Q, K)) * inside).astype(dtype)
  Q, K = heads(Q), heads(K)

  def step(S, x):
    Q, K, W, U, P, start, end, whole = x
    R = U.astype(F32) - einsum("bhck,bhkv->bhcv", W, S.astype(dtype))
    O = start[..., None] * einsum("bhck,bhkv->bhcv", Q, S.astype(dtype))
    O += einsum("bhcd,bhdv->bhcv", P, R.astype(dtype))
    new = einsum("bhck,bhcv->bhkv", K, (end[..., None] * R).astype(dtype))
    return whole[..., None, None] * S + new, (O * options.scale).astype(v.dtype)

  S = jnp.zeros((B, Hv, dk, dv), F32) if S0 is None else S0
  S, O = lax.scan(jax.checkpoint(step), S, (Q, K, W, U, P, start, end, whole))
  o = jnp.moveaxis(O, (0, 2), (1, 3)).reshape(B, L, Hv, dv)
  return o, S


def power_of_two(size):
  return max(16, 1 << (size - 1).bit_length())


def prepare(q, k, v, beta, g, S0, segment_ids, chunk):
  """Pads to whole chunks and power-of-two head sizes; counts segments from 0."""
  check_inputs(q, k, v, beta, g)
  if chunk & (chunk - 1) or chunk < 16:
    raise ValueError(f"chunk must be a power of two of at least 16, got {chunk}")
  L = round_up(q.shape[1], chunk)
  pk, pv = power_of_two(k.shape[3]), power_of_two(v.shape[3])
  q, k = (pad_axis(pad_axis(x, 1, L), 3, pk) for x in (q, k))
  v = pad_axis(pad_axis(v, 1, L), 3, pv)
  beta = pad_axis(beta, 1, L)
  g = None if g is None else pad_axis(g, 1, L)
  S0 = None if S0 is None else pad_axis(pad_axis(S0.astype(F32), 2, pk), 3, pv)
  seg = None
  if segment_ids is not None:
    # Documents are runs of equal ids, so a running count serves even when an id comes back.
    change = (segment_ids[:, 1:] != segment_ids[:, :-1]).astype(jnp.int32)
    seg = pad_axis(jnp.cumsum(pad_first(change), axis=1), 1, L, "edge")
  return q, k, v, beta, g, seg, S0


def pad_first(x):
  return jnp.pad(x, ((0, 0), (1, 0)))


def clamp_chunk(chunk, dtype):
  return min(chunk, MAX_CHUNK[jnp.dtype(dtype).name])


def default_inverse(dtype):
  return "bf16x6" if dtype == F32 else "bf16x3"


def delta_rule_gpu(
  q,
  k,
  v,
  beta,
  g=None,
  S0=None,
  segment_ids=None,
  *,
  scale=1.0,
  chunk=64,
  inverse_precision=None,
  fused=True,
  interpret=False,
):
  """S <- e^g S + k beta (v - k e^g S)^T, o = scale q S, over a sequence; returns (o, S).

  Args:
    q, k: [B L H dk].
    v: [B L Hv dv], Hv a multiple of H; value head j uses key head j // (Hv // H).
    beta, g: [B L Hv]; g is a log decay <= 0 or None.
    S0: [B Hv dk dv] or None for zeros.
    segment_ids: [B L] int32; the state starts from zero wherever the id changes.
    chunk: tokens per chunk, a power of two; the tile tables may lower it.
    inverse_precision: "bf16", "bf16x3", "bf16x6" or "substitution"; None is bf16x6 for float32
      inputs and bf16x3 for bfloat16 ones.
    fused: False runs the UT kernel and a lax.scan over chunks.
  """
  length, dk, dv = v.shape[1], k.shape[-1], v.shape[-1]
  chunk = clamp_chunk(chunk, k.dtype)
  options = _Options(
    float(scale), chunk, inverse_precision or default_inverse(k.dtype), bool(interpret)
  )
  args = prepare(q, k, v, beta, g, S0, segment_ids, chunk)
  if fused:
    o, S = _fused(*args, options)
  else:
    run = functools.partial(scan_chunks, options=options, transform=ut_pallas)
    o, S = jax.checkpoint(run)(*args)
  return o[:, :length, :, :dv], S[:, :, :dk, :dv]
