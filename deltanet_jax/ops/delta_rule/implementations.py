"""The table of implementations of the delta rule: by name, what runs and which step decodes.

What a kernel does not take it refuses itself (`pallas_kernels.delta_rule.checks`).
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops import layer_state
from deltanet_jax.ops.delta_rule import chunkwise, parallel
from deltanet_jax.ops.delta_rule.recurrent import recurrent
from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.dtypes import matmul_precision_for, state_dtype
from deltanet_jax.ops.layer_state import LayerState
from deltanet_jax.ops.segments import number_segments
from pallas_kernels.delta_rule.checks import unsupported_reason


@dataclasses.dataclass(frozen=True)
class Form:
  """One way to compute the delta rule.

  `run(q, k, v, beta, g, S0, segment_ids, scale=, chunk=)` and `step(token, S, g_t, scale=)`; a
  kernel's `run` takes inverse_precision too, and `interpret` where it has an interpreter.
  """

  run: Callable
  step: Callable
  kernel: bool = False
  interprets: bool = False


def _plain(form):
  """A form over inputs of one dtype, with as many key heads as value heads."""

  def run(q, k, v, beta, g, S0, segment_ids, *, scale, chunk):
    del chunk  # the whole sequence is one, or each token
    dtype = state_dtype(q, k, v, beta, g, S0)
    segments = None if segment_ids is None else number_segments(segment_ids)
    heads = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(x.astype(dtype), heads, axis=2) for x in (q * scale, k))
    g = None if g is None else g.astype(dtype)
    with matmul_precision_for(v.dtype):
      S0 = _state(q, v, S0, dtype)
      o, S = form(q, k, v.astype(dtype), beta.astype(dtype), g, S0, segments)
    return o.astype(v.dtype), S

  return run


def _state(q, v, S0, dtype):
  shape = (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
  return jnp.zeros(shape, dtype) if S0 is None else S0.astype(dtype)


def _chunkwise(q, k, v, beta, g, S0, segment_ids, *, primal="chunks", **options):
  segments = None if segment_ids is None else number_segments(segment_ids)
  S0 = _state(q, v, S0, state_dtype(q, k, v, beta, g, S0))
  return chunkwise.chunkwise(q, k, v, beta, g, S0, segments, primal=primal, **options)


def _fastest_plain(*inputs, chunk, **options):
  """Chunks for gradients; where none are taken and no chunk is asked for, tokens if faster."""
  primal = "fastest" if chunk is None else "chunks"
  return _chunkwise(*inputs, chunk=chunk, primal=primal, **options)


def _kernel(name):
  """A function of `pallas_kernels.delta_rule`, imported when it is called: it is heavy."""

  def run(q, k, v, beta, g, S0, segment_ids, **options):
    from pallas_kernels import delta_rule as kernels

    return getattr(kernels, name)(q, k, v, beta, g, S0, segment_ids, **options)

  return run


def _kernel_step(name):
  """The same of a decoding step; it changes a slot's state where it lies."""

  def step(token, S, g_t, **options):
    from pallas_kernels import delta_rule as kernels

    run = getattr(kernels, name)
    if not isinstance(S, LayerState):
      return run(*token, S, g_t, **options)
    o, stack = run(*token, S.stack, g_t, layer=S.layer, **options)
    return o, LayerState(stack, S.layer)

  return step


_recurrent = _plain(recurrent)


def _recurrent_step(token, S, g_t, *, scale):
  q, k, v, beta = (x[:, None] for x in token)
  g = None if g_t is None else g_t[:, None]
  o, new = _recurrent(q, k, v, beta, g, layer_state.read(S), None, scale=scale, chunk=None)
  return o[:, 0], layer_state.write(S, new)


def _by_platform(q, k, v, beta, g, S0, segment_ids, **options):
  """Every platform's own form in one program; lowering keeps the one it is for."""
  inputs = (q, k, v, beta, g, S0, segment_ids)
  if unsupported_reason(*inputs[:6], channels=True):
    return _chunkwise(*inputs, **options)
  forms = {name: lambda x, form=form: FORMS[form].run(*x, **options) for name, form in _BY_PLATFORM}
  return lax.platform_dependent(inputs, **forms)


def _step_by_platform(token, S, g_t, **options):
  if unsupported_reason(*token, g_t, S, channels=True):
    return _recurrent_step(token, S, g_t, **options)
  forms = {
    name: lambda *x, form=form: FORMS[form].step(*x, **options) for name, form in _BY_PLATFORM
  }
  return lax.platform_dependent(token, S, g_t, **forms)


# Named as `lax.platform_dependent` does.
_BY_PLATFORM = (("tpu", "pallas_tpu"), ("cuda", "pallas_gpu"), ("default", "chunkwise"))
_FASTEST = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}

FORMS = {
  "recurrent": Form(_recurrent, _recurrent_step),
  "chunkwise": Form(_chunkwise, _recurrent_step),
  "parallel": Form(_plain(parallel.parallel), _recurrent_step),
  "pallas_tpu": Form(
    _kernel("delta_rule_tpu"), _kernel_step("delta_rule_step_tpu"), kernel=True, interprets=True
  ),
  "pallas_gpu": Form(
    _kernel("delta_rule_gpu"), _kernel_step("delta_rule_step_gpu"), kernel=True, interprets=True
  ),
  "triton": Form(_kernel("delta_rule_triton"), _kernel_step("delta_rule_step_gpu"), kernel=True),
  "by_platform": Form(_by_platform, _step_by_platform),
}
Implementation = Literal[tuple(FORMS)]


def fastest(q, k, v, beta, g, S0) -> Form:
  """The platform's fastest form for these inputs, of a sequence or a token."""
  form = FORMS.get(_FASTEST.get(target_platform()))
  if form is None or unsupported_reason(q, k, v, beta, g, S0, channels=True):
    return Form(_fastest_plain, _recurrent_step)
  return form
