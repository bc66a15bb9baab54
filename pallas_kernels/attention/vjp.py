"""Attention by kernels and its derivatives of any order."""

import functools

from pallas_kernels.attention import reference
from pallas_kernels.attention.checks import NO_FORWARD_MODE
from pallas_kernels.common.differentiable import Kernels, by_kernels


def attend(forward, backward, q, k, v, segments, window):
  """o `[B L H d]`.

  Args:
    forward: (q, k, v, segments, save=) -> o, and the log of each softmax's sum to save it.
    backward: (q, k, v, segments, o, that, do) -> dq, dk, dv.
  """

  def run(*args):
    return forward(*args, save=False)[:1]

  def save(*args):
    o, sums = forward(*args, save=True)
    return (o,), (o, sums)

  def pull(args, residuals, cotangents):
    return *backward(*args, *residuals, *cotangents), None

  kernels = Kernels(
    run=run,
    save=save,
    backward=pull,
    plain=lambda *args: (functools.partial(reference.causal_attention, window=window)(*args),),
    unsupported_reason=NO_FORWARD_MODE,
  )
  return by_kernels(kernels, q, k, v, segments)[0]
