"""What both of jax's kernels need around them: derivatives, and the settings they were made for."""

import contextlib
import functools

import jax

from pallas_kernels.attention import plain
from pallas_kernels.attention.checks import NO_FORWARD_MODE
from pallas_kernels.differentiable import Kernels, by_kernels


@contextlib.contextmanager
def _as_written():
  """The settings of jax that these kernels were written for, whatever the caller's are."""
  promotion = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
  with jax.enable_x64(False), promotion[0], promotion[1]:
    yield


def attend(forward, backward, q, k, v, documents, window):
  """o `[B L H d]`.

  Args:
    forward: (q, k, v, documents, save=) -> o, and the log of each softmax's sum to save it.
    backward: (q, k, v, documents, o, that, do) -> dq, dk, dv.
  """

  def run(*args):
    with _as_written():
      return forward(*args, save=False)[:1]

  def save(*args):
    with _as_written():
      o, sums = forward(*args, save=True)
    return (o,), (o, sums)

  def pull(args, residuals, cotangents):
    with _as_written():
      return *backward(*args, *residuals, *cotangents), None

  kernels = Kernels(
    run=run,
    save=save,
    backward=pull,
    plain=lambda *args: (functools.partial(plain.causal_attention, window=window)(*args),),
    refusal=NO_FORWARD_MODE,
  )
  return by_kernels(kernels, q, k, v, documents)[0]
