"""The GPU that kernels are traced for: this process's own, unless another is named."""

import contextlib

import jax

# Part of the key of jax's caches: what was traced for one GPU is not taken for another.
_compiling_for = jax.make_user_context(None)


def compiling_for_gpu(device_kind: str) -> contextlib.AbstractContextManager:
  """Kernels traced inside take the tiles of the GPU that jax calls `device_kind`.

  For compiling ahead of time, where no device says what it is.
  """
  return _compiling_for(device_kind)


def device_kind() -> str | None:
  """As jax calls it; None if there is no GPU and none was named."""
  here = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
  return _compiling_for.value or here
