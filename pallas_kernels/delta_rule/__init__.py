"""Delta rule kernels: differentiable over a sequence, and one decoding step.

The functions import Pallas (or jax-triton) when they are called: `delta_rule.checks` is usable
without either.
"""


def delta_rule_tpu(q, k, v, beta, g=None, S0=None, segment_ids=None, **options):
  """Apply the delta rule to a sequence on TPU; see `delta_rule.pallas_tpu.vjp.delta_rule_tpu`."""
  from pallas_kernels.delta_rule.pallas_tpu import vjp

  return vjp.delta_rule_tpu(q, k, v, beta, g, S0, segment_ids, **options)


def delta_rule_gpu(q, k, v, beta, g=None, S0=None, segment_ids=None, **options):
  """Apply the delta rule to a sequence on GPU; see `delta_rule.pallas_gpu.vjp.delta_rule_gpu`."""
  from pallas_kernels.delta_rule.pallas_gpu import vjp

  return vjp.delta_rule_gpu(q, k, v, beta, g, S0, segment_ids, **options)


def delta_rule_triton(q, k, v, beta, g=None, S0=None, segment_ids=None, **options):
  """Apply the delta rule with the UT transform in Triton; see `delta_rule.ut.triton`."""
  from pallas_kernels.delta_rule.ut import triton

  return triton.delta_rule_triton(q, k, v, beta, g, S0, segment_ids, **options)


def delta_rule_step_tpu(q_t, k_t, v_t, beta_t, S, g_t=None, **options):
  """Apply one decoding step on TPU; see `delta_rule.pallas_tpu.step.delta_rule_step_tpu`."""
  from pallas_kernels.delta_rule.pallas_tpu import step

  return step.delta_rule_step_tpu(q_t, k_t, v_t, beta_t, S, g_t, **options)


def delta_rule_step_gpu(q_t, k_t, v_t, beta_t, S, g_t=None, **options):
  """Apply one decoding step on GPU; see `delta_rule.pallas_gpu.step.delta_rule_step_gpu`."""
  from pallas_kernels.delta_rule.pallas_gpu import step

  return step.delta_rule_step_gpu(q_t, k_t, v_t, beta_t, S, g_t, **options)
