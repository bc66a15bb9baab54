"""The delta rule: recurrent, chunkwise and fully parallel forms, and fused kernels."""

from typing import Literal

from deltanet_jax.ops.delta_rule.api import delta_rule, delta_rule_attention, delta_rule_step
from deltanet_jax.ops.delta_rule.implementations import DELTA_RULE
from deltanet_jax.ops.delta_rule.wy import ut_transform, wy_representation

Implementation = Literal[tuple(DELTA_RULE.table)]  # for annotations

__all__ = [
  "DELTA_RULE",
  "Implementation",
  "delta_rule",
  "delta_rule_attention",
  "delta_rule_step",
  "ut_transform",
  "wy_representation",
]
