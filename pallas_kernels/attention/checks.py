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


def refusal(name: str, q, k, v, window: int | None) -> str | None:
  """Why the kernel of this name does not take q, k, v `[B L H d]`, in one sentence, or None.

  float32 is not taken: the kernels multiply it in one bfloat16 (TPU) or TF32 (GPU) pass.
  """
  L, d = q.shape[1], q.shape[3]
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
  if name == "pallas_gpu" and window is not None and window < L:
    return (
      f"pallas_gpu has no window, and {window} is less than the {L} tokens of a row; use"
      ' implementation="plain", or "cudnn" without documents'
    )
  return None


def check_inputs(name: str, q, k, v, window: int | None):
  """Raises what `refusal` says of these inputs."""
  if reason := refusal(name, q, k, v, window):
    raise ValueError(reason)
