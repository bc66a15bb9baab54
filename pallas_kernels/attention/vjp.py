"""Derivatives of attention kernels, of any order."""

from pallas_kernels.attention import reference
from pallas_kernels.common.differentiable import KernelVJP, call_kernel


def differentiable_attention(forward, backward, q, k, v, segments, window):
  """Return o [B L H d] of a forward kernel, differentiable by a backward kernel.

  Args:
    forward: (q, k, v, segments, save=) -> (o, log2-sum-exp of the scores if save else None).
    backward: (q, k, v, segments, o, log2-sum-exp, do) -> (dq, dk, dv).
  """

  def run(*args):
    return forward(*args, save=False)[:1]

  def run_saving(*args):
    o, logsumexp = forward(*args, save=True)
    return (o,), (o, logsumexp)

  def run_backward(args, residuals, cotangents):
    return *backward(*args, *residuals, *cotangents), None

  kernel = KernelVJP(
    forward=run,
    forward_saving=run_saving,
    backward=run_backward,
    reference=lambda *args: (reference.causal_attention(*args, window=window),),
    name="attention",
  )
  return call_kernel(kernel, q, k, v, segments)[0]
