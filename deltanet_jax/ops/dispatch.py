"""The platform that a program is compiled for: this process's own, unless another is named."""

import contextlib

import jax

PLATFORMS = ("cpu", "gpu", "tpu")
# Part of the key of jax's caches: what was traced for one platform is not taken for another.
_compiling_for = jax.make_user_context(None)


def compiling_for(platform: str) -> contextlib.AbstractContextManager:
  """Operators traced inside take the implementation of `platform`, not of this process.

  For compiling ahead of time: `with compiling_for("tpu"): jax.jit(f).trace(x).lower(
  lowering_platforms=("tpu",))`.
  """
  if platform not in PLATFORMS:
    raise ValueError(f"platform is {platform!r}, expected one of {list(PLATFORMS)}.")
  return _compiling_for(platform)


def target_platform() -> str:
  """One of PLATFORMS."""
  return _compiling_for.value or jax.default_backend()
