"""Gated per-head RMSNorm in plain JAX, for second derivatives of the kernels."""

from jax import lax


def head_norm(x, scale, gate, *, eps, gate_activation, size):
  """Normalize every `size` channels of x [B, L, D]; scale [B, size], gate [B, L, D] or None."""
  heads = lambda y: y.reshape(*y.shape[:2], -1, size).astype(scale.dtype)
  y = gated_rms_norm(
    heads(x), scale[:, None, None], None if gate is None else heads(gate), eps, gate_activation
  )
  return y.reshape(x.shape).astype(x.dtype)


def gated_rms_norm(x, scale, gate, eps, gate_activation):
  """Return scale x / sqrt(mean(x^2) + eps) over the last axis, times gate_activation(gate)."""
  y = x * lax.rsqrt((x * x).sum(axis=-1, keepdims=True) / x.shape[-1] + eps) * scale
  return y if gate is None else y * gate_activation(gate)
