"""The delta rule as kernels: differentiable over a sequence, and one decoding step."""

from pallas_kernels.delta_rule.jax_triton_ut import delta_rule_triton
from pallas_kernels.delta_rule.mosaic_tpu import delta_rule_tpu
from pallas_kernels.delta_rule.mosaic_tpu_step import delta_rule_step_tpu
from pallas_kernels.delta_rule.triton_gpu import delta_rule_gpu
from pallas_kernels.delta_rule.triton_gpu_step import delta_rule_step_gpu

__all__ = [
  "delta_rule_gpu",
  "delta_rule_step_gpu",
  "delta_rule_step_tpu",
  "delta_rule_tpu",
  "delta_rule_triton",
]
