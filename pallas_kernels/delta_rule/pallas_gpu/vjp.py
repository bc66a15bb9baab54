"""Differentiable delta rule and linear attention on NVIDIA GPUs (Pallas, Triton lowering).

One program per (value block, head, sequence) carries the state over all chunks. Residuals: the
inputs, X and, unless `scores_in_place`, the scores P (X and P each C/dk the size of k). R and the
states per chunk are recomputed; with per-channel gates also P and the decayed q and k.
"""

import functools
from typing import NamedTuple

from pallas_kernels.common import bf16
from pallas_kernels.common.differentiable import KernelVJP, call_kernel
from pallas_kernels.common.platform import require_platform
from pallas_kernels.delta_rule.checks import check_inputs
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
  inverse_precision: str | None  # None for linear attention, which has no inverse
  interpret: bool

  @property
  def launch(self):
    return dict(scale=self.scale, chunk=self.chunk, interpret=self.interpret)


def _forward_saving(q, k, v, beta, g, segments, S0, *, options):
  precision = options.inverse_precision
  P, X, decayed = intra(q, k, v, beta, g, segments, inverse_precision=precision, **options.launch)
  out = forward(q, k, v, beta, X, P, g, segments, S0, decayed, **options.launch)
  return out, (X, P if decayed is None else None)


def _backward(args, residuals, cotangents, *, options):
  q, k, v, beta, g, segments, S0 = args
  (X, P), (do, dS) = residuals, cotangents
  chunk, interpret = options.chunk, options.interpret
  decayed = None
  if g is not None and g.ndim == 4:
    P, _, decayed = intra(q, k, v, beta, g, segments, inverse_precision=None, **options.launch)
  before, R = states(k, v, beta, X, g, segments, S0, decayed, chunk=chunk, interpret=interpret)
  dY, after, dS0 = dstates(q, k, v, beta, X, P, g, segments, do, dS, decayed, **options.launch)
  gradients = grads if decayed is None else per_channel_grads.grads
  dq, dk, dv, dbeta, dg = gradients(
    q, k, v, beta, g, segments, R, None if R is None else dY, do, before, after, **options.launch
  )
  # In linear attention the written values are v, and dY is their gradient.
  dv = dY if dv is None else dv
  return dq, dk, dv, dbeta, dg, None, dS0 if S0 is not None else None


def _reference(q, k, v, beta, g, segments, S0, *, options):
  scale, chunk = options.scale, options.chunk
  if g is not None and g.ndim == 4:
    return reference.recurrent(q, k, v, beta, g, S0, segments, scale=scale)
  chunkwise = reference.linear_attention if beta is None else reference.delta_rule
  return chunkwise(q, k, v, beta, g, S0, segments, scale=scale, chunk=chunk)


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
  """Apply the delta rule to a sequence and return (o, S_L).

  S <- e^g S + k beta (v - k e^g S)^T, o = scale q S.

  Args:
    q, k: [B L H dk].
    v: [B L Hv dv], Hv a multiple of H; value head j uses key head j // (Hv // H).
    beta: [B L Hv].
    g: log decay <= 0, per head [B L Hv] or per channel [B L Hv dk]; or None.
    S0: [B Hv dk dv] or None for zeros.
    segment_ids: [B L] int32 or None; the state is reset to zero where the id changes.
    chunk: tokens per chunk, a power of two >= 16; None for 64. Lowered to 32 for float32.
    inverse_precision: of the matmuls that compute (I + A)^-1: "bf16", "bf16x3", "bf16x6" or
      "substitution". None: bf16x6 for float32, bf16 for bfloat16.
    fused: False runs the UT-transform kernel and a lax.scan over chunks, which do not support
      per-channel gates.
    interpret: True to run on CPU.
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
  return _apply(q, k, v, beta, g, S0, segment_ids, options)


def linear_attention_gpu(
  q, k, v, g=None, S0=None, segment_ids=None, *, scale=1.0, chunk=None, interpret=False
):
  """Apply linear attention to a sequence and return (o, S_L).

  S <- e^g S + k v^T, o = scale q S. Arguments as in `delta_rule_gpu`.
  """
  check_inputs(q, k, v, None, g, S0, channels=True)
  q = q if interpret else require_platform(q, "cuda", "linear_attention_gpu")
  options = _Options(float(scale), clamp_chunk(chunk, k.dtype), None, bool(interpret))
  return _apply(q, k, v, None, g, S0, segment_ids, options)


def _apply(q, k, v, beta, g, S0, segment_ids, options):
  length, dk, dv = v.shape[1], k.shape[-1], v.shape[-1]
  args = prepare(q, k, v, beta, g, S0, segment_ids, options.chunk)
  kernel = KernelVJP(
    forward=lambda *args: _forward_saving(*args, options=options)[0],
    forward_saving=functools.partial(_forward_saving, options=options),
    backward=functools.partial(_backward, options=options),
    reference=functools.partial(_reference, options=options),
    name="linear_attention_gpu" if beta is None else "delta_rule_gpu",
    residual_batch_axis=1,
  )
  o, S = call_kernel(kernel, *args)
  return o[:, :length, :, :dv], S[:, :, :dk, :dv]
