"""Linear attention kernels: those of `pallas_kernels.delta_rule` without the correction term.

The functions import Pallas when they are called.
"""


def linear_attention_tpu(q, k, v, g=None, S0=None, segment_ids=None, **options):
  """Apply linear attention on TPU; see `delta_rule.pallas_tpu.vjp.linear_attention_tpu`."""
  from pallas_kernels.delta_rule.pallas_tpu import vjp

  return vjp.linear_attention_tpu(q, k, v, g, S0, segment_ids, **options)


def linear_attention_gpu(q, k, v, g=None, S0=None, segment_ids=None, **options):
  """Apply linear attention on GPU; see `delta_rule.pallas_gpu.vjp.linear_attention_gpu`."""
  from pallas_kernels.delta_rule.pallas_gpu import vjp

  return vjp.linear_attention_gpu(q, k, v, g, S0, segment_ids, **options)


def linear_attention_step_tpu(q_t, k_t, v_t, S, g_t=None, **options):
  """Apply one decoding step on TPU; see `delta_rule.pallas_tpu.step`."""
  from pallas_kernels.delta_rule.pallas_tpu import step

  return step.linear_attention_step_tpu(q_t, k_t, v_t, S, g_t, **options)


def linear_attention_step_gpu(q_t, k_t, v_t, S, g_t=None, **options):
  """Apply one decoding step on GPU; see `delta_rule.pallas_gpu.step`."""
  from pallas_kernels.delta_rule.pallas_gpu import step

  return step.linear_attention_step_gpu(q_t, k_t, v_t, S, g_t, **options)
