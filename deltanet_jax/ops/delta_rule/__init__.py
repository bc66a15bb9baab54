"""The delta rule: recurrent, chunkwise and fully parallel."""

from deltanet_jax.ops.delta_rule.api import delta_rule, delta_rule_attention, delta_rule_step
from deltanet_jax.ops.delta_rule.implementations import Implementation
from deltanet_jax.ops.delta_rule.wy import ut_transform, wy_representation

__all__ = [
  "Implementation",
  "delta_rule",
  "delta_rule_attention",
  "delta_rule_step",
  "ut_transform",
  "wy_representation",
]
