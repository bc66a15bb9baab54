"""Limits of the softmax attention kernels; does not import Pallas."""

import jax.numpy as jnp

# Channels of a head: a program of the GPU kernel holds full heads of a block of tokens.
MAX_HEAD_SIZE = {"pallas_tpu": 256, "pallas_gpu": 128}
_DTYPES = {"pallas_tpu": (jnp.bfloat16,), "pallas_gpu": (jnp.bfloat16, jnp.float16)}


def unsupported_reason(name: str, q, k, v) -> str | None:
  """Return why the kernel `name` does not support q, k, v `[B L H d]`, or None if it does.

  float32 is unsupported: the kernels would multiply it in one bfloat16 (TPU) or TF32 (GPU) pass.
  """
  d = q.shape[3]
  if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES[name]:
    wanted = " or ".join(jnp.dtype(x).name for x in _DTYPES[name])
    return f"{name} takes q, k, v of one dtype, {wanted}, got {q.dtype}, {k.dtype}, {v.dtype}"
  if d > MAX_HEAD_SIZE[name]:
    return f"{name} takes heads of up to {MAX_HEAD_SIZE[name]} channels, got {d}"
  return None


def check_inputs(name: str, q, k, v):
  """Raise ValueError if the kernel `name` does not support these inputs."""
  if reason := unsupported_reason(name, q, k, v):
    raise ValueError(reason)
