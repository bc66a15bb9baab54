"""Differentiable delta rule and linear attention on NVIDIA GPUs (Pallas, Triton lowering).

One program per (head, value block, sequence) carries the state over all chunks. Kept for the
backward: the inputs, the inverses X and, with gates or in float32, the scores P (each C/dk of k's
size); R and per-chunk states are recomputed, with gates of channels the scores too, beside the
decayed q and k.
"""

import functools
from typing import NamedTuple

from pallas_kernels.common import bf16
from pallas_kernels.common.differentiable import KernelVJP, call_kernel
from pallas_kernels.common.platform import require_platform
from pallas_kernels.delta_rule.checks import NO_FORWARD_MODE, check_inputs
from pallas_kernels.delta_rule.pallas_gpu import per_channel_grads
from pallas_kernels.delta_rule.pallas_gpu.backward import dstates, states
from pallas_kernels.delta_rule.pallas_gpu.forward import forward
from pallas_kernels.delta_rule.pallas_gpu.grads import grads
from pallas_kernels.delta_rule.pallas_gpu.intra_chunk import intra
from pallas_kernels.delta_rule.pallas_gpu.tiles import clamp_chunk, prepare
from pallas_kernels.delta_rule.ut import pallas as ut
from pallas_kernels.delta_rule.ut import reference
from pallas_kernels.delta_rule.ut.scan import delta_rule_by_scan


class _Options(NamedTuple):
  scale: float
  chunk: int
  inverse_precision: str | None  # None for linear attention, which inverts nothing
  interpret: bool


def _save(q, k, v, beta, g, segments, S0, *, options):
  scale, chunk, inverse_precision, interpret = options
  how = dict(scale=scale, chunk=chunk, interpret=interpret)
  P, X, decayed = intra(q, k, v, beta, g, segments, inverse_precision=inverse_precision, **how)
  out = forward(q, k, v, beta, X, P, g, segments, S0, decayed, **how)
  return tuple(out), (X, P if decayed is None else None)


def _backward(args, residuals, cotangents, *, options):
  q, k, v, beta, g, segments, S0 = args
  (X, P), (do, dS) = residuals, cotangents
  scale, chunk, _, interpret = options
  how = dict(scale=scale, chunk=chunk, interpret=interpret)
  decayed = None
  if g is not None and g.ndim == 4:
    P, _, decayed = intra(q, k, v, beta, g, segments, inverse_precision=None, **how)
  before, *R = states(k, v, beta, X, g, segments, S0, decayed, chunk=chunk, interpret=interpret)
  dY, after, dS0 = dstates(q, k, v, beta, X, P, g, segments, do, dS, decayed, **how)
  # Of linear attention R is v, and dY its gradient.
  R, of_R = (R[0], dY) if R else (None, None)
  of_states = (R, of_R, do, before, after)
  if decayed is None:
    dq, dk, dv, dbeta, dg = grads(q, k, v, beta, g, segments, *of_states, **how)
  else:
    dq, dk, dv, dbeta, dg = per_channel_grads.grads(q, k, v, beta, g, segments, *of_states, **how)
  dv = dY if dv is None else dv
  return dq, dk, dv, dbeta, dg, None, dS0 if S0 is not None else None


def _plain(q, k, v, beta, g, segments, S0, *, options):
  scale, chunk = options.scale, options.chunk
  if g is not None and g.ndim == 4:
    return reference.recurrent(q, k, v, beta, g, S0, segments, scale=scale)
  form = reference.linear_attention if beta is None else reference.delta_rule
  return form(q, k, v, beta, g, S0, segments, scale=scale, chunk=chunk)


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
  chunk=None,
  inverse_precision=None,
  fused=True,
  interpret=False,
):
  """S <- e^g S + k beta (v - k e^g S)^T, o = scale q S, over a sequence; returns (o, S).

  Args:
    q, k: [B L H dk].
    v: [B L Hv dv], Hv a multiple of H; value head j uses key head j // (Hv // H).
    beta: [B L Hv].
    g: log decay <= 0 [B L Hv] or, of key channels, [B L Hv dk]; or None.
    S0: [B Hv dk dv] or None for zeros.
    segment_ids: [B L] int32; the state starts from zero wherever the id changes.
    chunk: tokens per chunk, a power of two; None is 64, and the tile tables may lower it.
    inverse_precision: "bf16", "bf16x3", "bf16x6" or "substitution"; None is bf16x6 for float32
      inputs and bf16 for bfloat16 ones.
    fused: False runs the UT kernel and a lax.scan over chunks, without gates of key channels.
  """
  check_inputs(q, k, v, beta, g, S0, channels=fused)
  chunk, scale, interpret = clamp_chunk(chunk, k.dtype), float(scale), bool(interpret)
  precision = bf16.inverse_precision(inverse_precision, k.dtype)
  q = q if interpret else require_platform(q, "cuda", "delta_rule_gpu")
  if not fused:
    options = ut.Options(chunk, precision, interpret)
    transform = lambda *chunks: ut.transform(*chunks, options)
    return delta_rule_by_scan(
      q, k, v, beta, g, S0, segment_ids, scale=scale, chunk=chunk, transform=transform
    )
  options = _Options(scale, chunk, precision, interpret)
  return _call_kernels(q, k, v, beta, g, S0, segment_ids, options)


def linear_attention_gpu(
  q, k, v, g=None, S0=None, segment_ids=None, *, scale=1.0, chunk=None, interpret=False
):
  """S <- e^g S + k v^T, o = scale q S, over a sequence; returns (o, S).

  Arguments and results are those of `delta_rule_gpu`.
  """
  check_inputs(q, k, v, None, g, S0, channels=True)
  q = q if interpret else require_platform(q, "cuda", "linear_attention_gpu")
  options = _Options(float(scale), clamp_chunk(chunk, k.dtype), None, bool(interpret))
  return _call_kernels(q, k, v, None, g, S0, segment_ids, options)


def _call_kernels(q, k, v, beta, g, S0, segment_ids, options):
  length, dk, dv = v.shape[1], k.shape[-1], v.shape[-1]
  args = prepare(q, k, v, beta, g, S0, segment_ids, options.chunk)
  options = dict(options=options)
  kernels = KernelVJP(
    forward=lambda *args: _save(*args, **options)[0],
    forward_saving=functools.partial(_save, **options),
    backward=functools.partial(_backward, **options),
    reference=functools.partial(_plain, **options),
    no_forward_mode=NO_FORWARD_MODE,
    residual_batch_axis=1,
  )
  o, S = call_kernel(kernels, *args)
  return o[:, :length, :, :dv], S[:, :, :dk, :dv]
