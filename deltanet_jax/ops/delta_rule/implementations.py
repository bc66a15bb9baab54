"""Table of the delta rule's implementations, for sequences and for decoding steps."""

from typing import NamedTuple

from deltanet_jax.ops import layer_state
from deltanet_jax.ops.delta_rule import chunkwise, parallel
from deltanet_jax.ops.delta_rule.recurrent import recurrent
from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator
from deltanet_jax.ops.dtypes import matmul_precision_for, state_dtype
from deltanet_jax.ops.inputs import cast_all, initial_state, scaled_heads
from deltanet_jax.ops.layer_state import LayerState
from deltanet_jax.ops.segments import number_segments
from pallas_kernels.delta_rule.checks import unsupported_reason


class Options(NamedTuple):
  """Options of `delta_rule` that every `run(q, k, v, beta, g, S0, segment_ids, options)` gets."""

  scale: float
  chunk: int | None
  inverse_precision: str | None
  interpret: bool
  primal: chunkwise.Primal  # of "chunkwise": how to compute calls that are not differentiated

  def check_exact(self, name):
    """Raise ValueError if an inverse precision was requested from an exact implementation."""
    if self.inverse_precision is not None:
      raise ValueError(
        f"inverse_precision is {self.inverse_precision!r}, expected None for implementation"
        f" {name!r}: it is for kernels, plain JAX always inverts exactly."
      )

  def for_kernel(self):
    """The keyword arguments of a kernel."""
    return dict(scale=self.scale, chunk=self.chunk, inverse_precision=self.inverse_precision)


def _same_heads(name, form):
  """Wrap a form that takes inputs of one dtype, with as many key heads as value heads."""

  def run(q, k, v, beta, g, S0, segment_ids, options):
    options.check_exact(name)
    dtype = state_dtype(q, k, v, beta, g, S0)
    S0 = _initial_state(q, v, S0, dtype)
    q, k = scaled_heads(q, k, options.scale, v.shape[2], dtype)
    inputs = cast_all(dtype, v, beta, g)
    with matmul_precision_for(v.dtype):
      o, S = form(q, k, *inputs, S0, number_segments(segment_ids))
    return o.astype(v.dtype), S

  return run


def _initial_state(q, v, S0, dtype):
  return initial_state(S0, (q.shape[0], v.shape[2], q.shape[3], v.shape[3]), dtype)


def _chunkwise(q, k, v, beta, g, S0, segment_ids, options):
  options.check_exact("chunkwise")
  S0 = _initial_state(q, v, S0, state_dtype(q, k, v, beta, g, S0))
  how = dict(scale=options.scale, chunk=options.chunk, primal=options.primal)
  return chunkwise.chunkwise(q, k, v, beta, g, S0, number_segments(segment_ids), **how)


# Kernels are imported inside functions: Pallas and Triton are slow to import.


def _pallas_tpu(*arguments):
  from pallas_kernels.delta_rule import delta_rule_tpu

  *inputs, options = arguments
  return delta_rule_tpu(*inputs, **options.for_kernel(), interpret=options.interpret)


def _pallas_gpu(*arguments):
  from pallas_kernels.delta_rule import delta_rule_gpu

  *inputs, options = arguments
  return delta_rule_gpu(*inputs, **options.for_kernel(), interpret=options.interpret)


def _triton(*arguments):
  from pallas_kernels.delta_rule import delta_rule_triton

  *inputs, options = arguments
  return delta_rule_triton(*inputs, **options.for_kernel())


_recurrent = _same_heads("recurrent", recurrent)


# Steps: step((q_t, k_t, v_t, beta_t), S, g_t, scale, interpret).


def _recurrent_step(token, S, g_t, scale, interpret):
  del interpret
  q, k, v, beta = (x[:, None] for x in token)
  g = None if g_t is None else g_t[:, None]
  options = Options(scale, None, None, False, "chunks")
  o, new = _recurrent(q, k, v, beta, g, layer_state.read(S), None, options)
  return o[:, 0], layer_state.write(S, new)


def _pallas_tpu_step(token, S, g_t, scale, interpret):
  from pallas_kernels.delta_rule import delta_rule_step_tpu

  return _step_in_place(delta_rule_step_tpu, token, S, g_t, scale, interpret)


def _pallas_gpu_step(token, S, g_t, scale, interpret):
  from pallas_kernels.delta_rule import delta_rule_step_gpu

  return _step_in_place(delta_rule_step_gpu, token, S, g_t, scale, interpret)


def _step_in_place(step, token, S, g_t, scale, interpret):
  """Run a step kernel; it updates the state of a `LayerState` inside its stack."""
  if not isinstance(S, LayerState):
    return step(*token, S, g_t, scale=scale, interpret=interpret)
  o, stack = step(*token, S.stack, g_t, layer=S.layer, scale=scale, interpret=interpret)
  return o, LayerState(stack, S.layer)


# Inputs are (q, k, v, beta, g, S0), [B L ..] of a sequence or [B ..] of one token.


def _pallas_reason(q, k, v, beta, g, S0):
  return unsupported_reason(q, k, v, beta, g, S0, channels=True)


def _triton_reason(q, k, v, beta, g, S0):
  # Its decoding step is that of pallas_gpu, which has per-channel gates.
  return unsupported_reason(q, k, v, beta, g, S0, channels=v.ndim == 3)


DELTA_RULE = Operator(
  "delta_rule",
  {
    "pallas_tpu": Entry(
      run=_pallas_tpu,
      step=_pallas_tpu_step,
      default_on=("tpu",),
      unsupported_reason=_pallas_reason,
      interpretable=True,
      forward_mode=False,
    ),
    "pallas_gpu": Entry(
      run=_pallas_gpu,
      step=_pallas_gpu_step,
      default_on=("gpu",),
      unsupported_reason=_pallas_reason,
      interpretable=True,
      forward_mode=False,
    ),
    "triton": Entry(
      run=_triton,
      step=_pallas_gpu_step,
      unsupported_reason=_triton_reason,
      forward_mode=False,
    ),
    "chunkwise": Entry(
      run=_chunkwise, step=_recurrent_step, default_on=PLATFORMS, forward_mode=False
    ),
    "recurrent": Entry(run=_recurrent, step=_recurrent_step),
    "parallel": Entry(run=_same_heads("parallel", parallel.parallel), step=_recurrent_step),
  },
)
