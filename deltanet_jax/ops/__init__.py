"""Differentiable operators on plain arrays; no Flax, no configuration."""

from deltanet_jax.ops.delta_rule import (
  delta_rule,
  delta_rule_attention,
  delta_rule_step,
  ut_transform,
  wy_representation,
)
from deltanet_jax.ops.triangular import unit_lower_inverse

__all__ = [
  "delta_rule",
  "delta_rule_attention",
  "delta_rule_step",
  "unit_lower_inverse",
  "ut_transform",
  "wy_representation",
]
