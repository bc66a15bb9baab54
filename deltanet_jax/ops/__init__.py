"""Differentiable operators on plain arrays, without Flax and configuration objects."""

from deltanet_jax.ops.attention import cached_attention, causal_attention, init_cache
from deltanet_jax.ops.delta_rule import (
  delta_rule,
  delta_rule_attention,
  delta_rule_step,
  ut_transform,
  wy_representation,
)
from deltanet_jax.ops.dispatch import compiling_for, target_platform
from deltanet_jax.ops.dplr import dplr, dplr_step
from deltanet_jax.ops.head_norm import head_norm
from deltanet_jax.ops.linear_attention import linear_attention, linear_attention_step
from deltanet_jax.ops.log_max_scan import empty_log_max_state, log_max_scan
from deltanet_jax.ops.logcumsumexp import logcumsumexp
from deltanet_jax.ops.long_conv import long_conv, long_conv_attention
from deltanet_jax.ops.norms import l1_norm, l2_norm, layer_norm, rms_norm
from deltanet_jax.ops.rope import rope
from deltanet_jax.ops.selective_scan import selective_scan
from deltanet_jax.ops.short_conv import short_conv, short_convs
from deltanet_jax.ops.state_space import state_space
from deltanet_jax.ops.token_shift import token_shift
from deltanet_jax.ops.triangular import unit_lower_inverse

__all__ = [
  "cached_attention",
  "causal_attention",
  "compiling_for",
  "delta_rule",
  "delta_rule_attention",
  "delta_rule_step",
  "dplr",
  "dplr_step",
  "empty_log_max_state",
  "head_norm",
  "init_cache",
  "l1_norm",
  "l2_norm",
  "layer_norm",
  "linear_attention",
  "linear_attention_step",
  "log_max_scan",
  "logcumsumexp",
  "long_conv",
  "long_conv_attention",
  "rms_norm",
  "rope",
  "selective_scan",
  "short_conv",
  "short_convs",
  "state_space",
  "target_platform",
  "token_shift",
  "unit_lower_inverse",
  "ut_transform",
  "wy_representation",
]
