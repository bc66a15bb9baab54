"""What no kernel of softmax attention takes; imports no Pallas."""

import jax.numpy as jnp

# What forward mode meets.
NO_FORWARD_MODE = (
  "forward mode (jax.jvp, jax.jacfwd, jax.linearize) is for attention with"
  ' implementation="plain": the kernels have a backward by hand instead.'
)
# Channels of a head: in the GPU's kernel a program holds whole heads of a block of tokens.
MAX_HEAD_SIZE = {"pallas_tpu": 256, "pallas_gpu": 128}
_DTYPES = {"pallas_tpu": (jnp.bfloat16,), "pallas_gpu": (jnp.bfloat16, jnp.float16)}


def unsupported_reason(name: str, q, k, v) -> str | None:
  """Why the kernel of this name does not take q, k, v `[B L H d]`, in one sentence, or None.

  float32 is not taken: the kernels multiply it in one bfloat16 (TPU) or TF32 (GPU) pass.
  """
  d = q.shape[3]
  if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES[name]:
    wanted = " or ".join(jnp.dtype(x).name for x in _DTYPES[name])
    return (
      f"{name} takes q, k, v of one dtype, {wanted}, got {q.dtype}, {k.dtype}, {v.dtype}; use"
      ' implementation="plain"'
    )
  if d > MAX_HEAD_SIZE[name]:
    return (
      f"{name} takes heads of up to {MAX_HEAD_SIZE[name]} channels, got {d}; use"
      ' implementation="plain"'
    )
  return None


def check_inputs(name: str, q, k, v):
  """Raises what `unsupported_reason` says of these inputs."""
  if reason := unsupported_reason(name, q, k, v):
    raise ValueError(reason)
